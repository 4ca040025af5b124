"""The requests for statistics of the sites' data: the shell around `server.statistics`."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.ground.printable import count_of, printable
from atoll.ground.strict_json import ManifestError
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.disclosure import Disclosure
from atoll.protocol.manifest import digest_of
from atoll.protocol.site_statistics import decode
from atoll.protocol.threads import off_loop, on_thread
from atoll.protocol.vocabulary import ClientId, RunId
from atoll.server.audit.actions import Action
from atoll.server.audit.log import AuditLog
from atoll.server.clock import MonotoneClock
from atoll.server.config.privacy import without_statistics
from atoll.server.config.process import CoordinatorConfig
from atoll.server.config.run import RunConfig
from atoll.server.config.secure import STATISTICS
from atoll.server.errors import OperatorError
from atoll.server.folding.evaluator import TASK_TIMEOUT_S, EvaluationFailed, Evaluator, Reference
from atoll.server.hosting.attendance import Attendance
from atoll.server.hosting.control_streams import Connection
from atoll.server.statistics.collection import CANNOT, Collection
from atoll.server.statistics.merging import document, shown
from atoll.server.statistics.results import FOLDER, keep, numbers_in
from atoll.task.given import OPTION
from atoll.task.task import task_name

logger = logging.getLogger(__name__)

DETAIL_MAX = 2000
OPEN_MAX = 4
"""Largest number of requests that are open at the same time."""


@dataclass(slots=True, eq=False)
class _Open:
    """Request that waits for answers."""

    number: int
    request: pb.AskStatistics
    deadline: float
    """Instant on the clock of the event loop [s]."""
    collection: Collection
    done: asyncio.Event = field(default_factory=asyncio.Event)


class StatisticsRequests:
    """Statistics requests to the connected sites of a task, and their results. All of it runs on one event loop.

    Args:
        config: the coordinator's settings.
        state: the state directory.
        attendance: the connected sites; it reports which come back and which are lost.
        clock: the coordinator's clock.
        audit: the audit log.
        spawn: starts a background task.
        private_runs: returns the tasks' names of the coordinator's private runs, each with a run of it.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        state: Path,
        attendance: Attendance,
        clock: MonotoneClock,
        audit: AuditLog,
        spawn: "Callable[[Coroutine[Any, Any, int]], asyncio.Task[int]]",
        private_runs: Callable[[], Mapping[str, RunId]],
    ) -> None:
        self._state, self._load_timeout = state, config.load_timeout
        self._hub, self._clock, self._audit, self._spawn = attendance.hub, clock, audit, spawn
        self._private_runs = private_runs
        attendance.listeners.append(self)
        self._open: dict[int, _Open] = {}
        self._newest = max(numbers_in(state), default=0)
        self._num_begun = 0

    async def collect(self, config: RunConfig, deadline_s: float) -> int:
        """Ask the connected sites of a planned run's task, and return the number of the kept result.

        Args:
            config: the settings of the planned run, of which task, name, options and seed are used.
            deadline_s: seconds in which sites may answer.

        Raises:
            OperatorError: the run has secure sums, or its task is of a private run; no answer is possible: no agent of
                the task is connected, all are too old, the task does not load or has no statistics; or too many
                requests are open.
            OSError: the result cannot be stored.
        """
        if config.secure is not None:
            raise OperatorError(STATISTICS)
        run_id = self._private_runs().get(task := task_name(config.task))
        if config.privacy is not None or run_id is not None:
            raise OperatorError(without_statistics(task, run_id))
        return await asyncio.shield(self._spawn(self._collect(config, deadline_s)))  # the caller may be cancelled

    async def _collect(self, config: RunConfig, deadline_s: float) -> int:
        if self._num_begun >= OPEN_MAX:
            raise OperatorError(f"{OPEN_MAX} requests for statistics are open already: let one of them end")
        self._num_begun += 1
        try:
            self._connections(task_name(config.task))  # before the task is loaded, which takes seconds
            await self._check_task(config)
            opened = self._ask(config, deadline_s)
            return await self._result(opened, config)
        finally:
            self._num_begun -= 1

    def _connections(self, task: str) -> list[Connection]:
        """Return the streams of the task's agents, if some can answer."""
        connected = list(self._hub)
        found = [connection for connection in connected if task in connection.tasks]
        if not found:
            tasks = ", ".join(sorted({name for connection in connected for name in connection.tasks})) or "none"
            raise OperatorError(
                f"no connected agent allows the task {task!r} ({count_of(len(connected), 'agent')} connected, tasks: "
                f"{tasks}): start agents with it, or see `atoll client list`"
            )
        if not any(connection.gives_statistics for connection in found):
            old = ", ".join(sorted(f"{c.client_id} ({c.software or 'unknown'})" for c in found)[:10])
            raise OperatorError(f"no connected agent of {task!r} can give statistics: update {old}")
        return found

    async def _check_task(self, config: RunConfig) -> None:
        """Load the task in a worker, with the run's options.

        Raises:
            OperatorError: the task does not load, refuses the options, or has no statistics.
        """
        reference = Reference(config.task, config.given, config.aggregation.algorithm, config.seed, config.rounds)
        folder = self._state / FOLDER
        await on_thread(None, lambda: folder.mkdir(mode=0o700, exist_ok=True))
        evaluator = Evaluator(
            reference, folder / "worker.log", timeout_s=TASK_TIMEOUT_S, load_timeout_s=self._load_timeout
        )
        try:
            await evaluator.check()
            if why_not := await evaluator.no_statistics():
                raise OperatorError(f"{config.task}: {why_not}")
        except EvaluationFailed as error:
            raise OperatorError(str(error)) from error
        finally:
            await on_thread(None, evaluator.close)

    def _ask(self, config: RunConfig, deadline_s: float) -> _Open:
        connections = self._connections(task_name(config.task))
        self._newest += 1
        options = {key: value for key, value in config.given.items() if key.startswith(OPTION)}
        request = pb.AskStatistics(
            run_id=f"{config.name}-statistics",
            number=self._newest,
            task=task_name(config.task),
            local=json.dumps(options, sort_keys=True),
            model_seed=config.seed,
        )
        asked = Collection(frozenset(connection.client_id for connection in connections))
        deadline = asyncio.get_running_loop().time() + deadline_s
        opened = self._open[self._newest] = _Open(self._newest, request, deadline, asked)
        logger.info("statistics %d: asking %s of %s", opened.number, count_of(len(connections), "site"), request.task)
        for connection in connections:
            self._send(opened, connection)
        return opened

    def _send(self, opened: _Open, connection: Connection) -> None:
        if not connection.gives_statistics:
            software = f" ({connection.software})" if connection.software else ""
            self._failed(opened, connection.client_id, f"{CANNOT}{software}")
            return
        message = pb.ServerMessage()
        message.ask_statistics.CopyFrom(opened.request)
        message.ask_statistics.time_left_s = max(0.0, opened.deadline - asyncio.get_running_loop().time())
        connection.send(message)

    async def _result(self, opened: _Open, config: RunConfig) -> int:
        began = self._clock.now()
        try:
            async with asyncio.timeout_at(opened.deadline):
                await opened.done.wait()
        except TimeoutError:
            opened.collection.close()
        finally:
            del self._open[opened.number]
        collection = opened.collection
        result = {
            "number": opened.number,
            "task": opened.request.task,
            "name": config.name,
            "options": config.options,
            "began_at": began,
            "ended_at": self._clock.now(),
            "asked": sorted(collection.asked),
            "answered": sorted(collection.answers),
            "refused": dict(sorted(collection.failures.items())),
        }
        result |= await on_thread(None, lambda: document(shown(collection.answers, collection.terms)))
        kept = await on_thread(None, keep, self._state, opened.number, result)
        outcome = f"{len(collection.answers)} of {count_of(len(collection.asked), 'site')} answered"
        logger.info("statistics %d of %s: %s", opened.number, opened.request.task, outcome)
        what = f"statistics {opened.number} of {opened.request.task}"
        self._audit.record(Action.STATISTICS_COLLECT, what, outcome, digests={"result": digest_of(kept)})
        return opened.number

    # ------------------------------------------------------------ the sites

    def joined(self, connection: Connection) -> None:
        """Repeat the open requests to a site that has reconnected."""
        for opened in self._open.values():
            if opened.collection.is_waiting_for(connection.client_id):
                self._send(opened, connection)

    def lost(self, client_id: ClientId, why: str) -> None:
        """Stop waiting for the answers of a lost site."""
        for opened in self._open.values():
            self._failed(opened, client_id, f"lost: {why}")

    async def answered(self, client_id: ClientId, message: pb.GiveStatistics) -> None:
        """Handle a site's answer, or its reason for none; an unexpected one is dropped unread."""
        opened = self._open.get(message.number)
        if opened is None or not opened.collection.is_waiting_for(client_id):
            return
        if message.error or not message.statistics:
            self._failed(opened, client_id, printable(message.error[:DETAIL_MAX]) or "it gave no reason")
            return
        num_bytes = len(message.statistics)
        try:
            found = await off_loop(num_bytes, decode, message.statistics)
        except ManifestError as error:
            self._failed(opened, client_id, f"its answer is not valid: {printable(str(error)[:DETAIL_MAX])}")
            return
        terms = Disclosure.read(message.leave, message.min_sites)
        opened.collection.answered(client_id, found, terms, num_bytes)
        self._note(opened)

    def _failed(self, opened: _Open, client_id: ClientId, why: str) -> None:
        opened.collection.failed(client_id, why)
        self._note(opened)

    def _note(self, opened: _Open) -> None:
        if opened.collection.is_complete:
            opened.done.set()

"""The requests for statistics of the sites' data: the shell around `server.statistics`."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.ground.printable import count_of, printable
from atoll.ground.process import crash_points
from atoll.ground.strict_json import ManifestError
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.disclosure import Disclosure
from atoll.protocol.manifest import digest_of
from atoll.protocol.secure.wire import name_of
from atoll.protocol.site_statistics import decode
from atoll.protocol.threads import off_loop, on_thread
from atoll.protocol.vocabulary import ClientId, RunId
from atoll.server.audit.actions import Action
from atoll.server.audit.log import AuditLog
from atoll.server.config.privacy import without_statistics
from atoll.server.config.process import CoordinatorConfig
from atoll.server.config.run import RunConfig
from atoll.server.config.secure import NO_LAYOUT, WITHOUT_CERTIFICATES
from atoll.server.errors import OperatorError
from atoll.server.folding.evaluator import TASK_TIMEOUT_S, EvaluationFailed, Evaluator, Reference
from atoll.server.hosting.attendance import Attendance
from atoll.server.hosting.control_streams import Connection
from atoll.server.hosting.secure_statistics import NOT_IN_SUM, Host, SecureStatistics, sites_to_ask
from atoll.server.hosting.secure_terms import options_text, requests_of
from atoll.server.statistics.collection import CANNOT, Collection
from atoll.server.statistics.merging import document, shown
from atoll.server.statistics.results import FOLDER, keep, numbers_in
from atoll.server.statistics.sum_sites import SumSites
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
        audit: the audit log.
        spawn: starts a background task.
        private_runs: returns the tasks' names of the coordinator's private runs, each with a run of it.
        authorities: returns the certificates of the trusted authorities, PEM.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        state: Path,
        attendance: Attendance,
        audit: AuditLog,
        spawn: "Callable[[Coroutine[Any, Any, int]], asyncio.Task[int]]",
        private_runs: Callable[[], Mapping[str, RunId]],
        authorities: Callable[[], bytes] = bytes,
    ) -> None:
        self._state, self._load_timeout = state, config.load_timeout
        self._hub, self._clock, self._audit, self._spawn = attendance.hub, attendance.clock, audit, spawn
        self._private_runs = private_runs
        attendance.listeners.append(self)
        self._is_insecure, self._sum_sites = config.insecure, SumSites(state)
        self._host = Host(attendance.hub, attendance.clock, authorities, self._sum_sites)
        self._open: dict[int, _Open] = {}
        self._secure: dict[int, SecureStatistics] = {}
        self._newest = max(numbers_in(state), default=0)
        self._num_begun = 0

    async def collect(self, config: RunConfig, deadline_s: float) -> int:
        """Ask the connected sites of a planned run's task, and return the number of the kept result.

        Args:
            config: the settings of the planned run, of which task, name, options and seed are used.
            deadline_s: seconds in which sites may answer.

        Raises:
            OperatorError: the task is of a private run; no answer is possible: no agent of the task is connected, all
                are too old, the task does not load or has no statistics; too many requests are open; or of a run with
                secure sums, the layout is missing or the sites of its sum are not connected.
            OSError: the result cannot be stored.
        """
        run_id = self._private_runs().get(task := task_name(config.task))
        if config.privacy is not None or run_id is not None:
            raise OperatorError(without_statistics(task, run_id))
        if config.secure is not None and config.secure.statistics is None:
            raise OperatorError(NO_LAYOUT)
        if config.secure is not None and self._is_insecure:
            raise OperatorError(WITHOUT_CERTIFICATES)
        return await asyncio.shield(self._spawn(self._collect(config, deadline_s)))  # the caller may be cancelled

    async def _collect(self, config: RunConfig, deadline_s: float) -> int:
        if self._num_begun >= OPEN_MAX:
            raise OperatorError(f"{OPEN_MAX} requests for statistics are open already: let one of them end")
        self._num_begun += 1
        try:
            self._connections(task_name(config.task))  # before the task is loaded, which takes seconds
            await self._check_task(config)
            if config.secure is not None:
                return await self._add(config, deadline_s)
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

    async def _add(self, config: RunConfig, deadline_s: float) -> int:
        """Add the statistics of sites in a secure sum, keep the result, and return its number."""
        task, began = task_name(config.task), self._clock.now()
        self._newest = number = max(self._newest, await on_thread(None, self._sum_sites.newest)) + 1
        known = await on_thread(None, self._sum_sites.sessions_of, task)
        asked = sites_to_ask(config, task, self._connections(task), known)
        await on_thread(None, self._sum_sites.begin, number)
        crash_points.reached("statistics.asked")
        logger.info("statistics %d: asking %s of %s for a secure sum", number, count_of(len(asked.sites), "site"), task)
        request = self._secure[number] = SecureStatistics(config, number, asked, began + deadline_s, self._host)
        try:
            found = await request.run()
        finally:
            del self._secure[number]
        result = self._about(number, config, began) | {"asked": sorted(asked.sites)} | found
        sums = "the secure sum" if len(asked.sessions) == 1 else "secure sums"
        how_many = f"{len(found['answered'])} of {count_of(len(asked.sites), 'site')} are in {sums}"
        return await self._kept(number, task, result, how_many)

    def _ask(self, config: RunConfig, deadline_s: float) -> _Open:
        connections = self._connections(task_name(config.task))
        self._newest += 1
        request = pb.AskStatistics(
            run_id=requests_of(config),
            number=self._newest,
            task=task_name(config.task),
            local=options_text(config),
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
        result = self._about(opened.number, config, began) | {
            "asked": sorted(collection.asked),
            "answered": sorted(collection.answers),
            "refused": dict(sorted(collection.failures.items())),
        }
        result |= await on_thread(None, lambda: document(shown(collection.answers, collection.terms)))
        outcome = f"{len(collection.answers)} of {count_of(len(collection.asked), 'site')} answered"
        return await self._kept(opened.number, opened.request.task, result, outcome)

    def _about(self, number: int, config: RunConfig, began: float) -> dict[str, Any]:
        return {
            "number": number,
            "task": task_name(config.task),
            "name": config.name,
            "options": config.options,
            "began_at": began,
            "ended_at": self._clock.now(),
        }

    async def _kept(self, number: int, task: str, result: dict[str, Any], outcome: str) -> int:
        kept = await on_thread(None, keep, self._state, number, result)
        logger.info("statistics %d of %s: %s", number, task, outcome)
        what = f"statistics {number} of {task}"
        self._audit.record(Action.STATISTICS_COLLECT, what, outcome, digests={"result": digest_of(kept)})
        return number

    # ------------------------------------------------------------ the sites

    def joined(self, connection: Connection) -> None:
        """Repeat the open requests to a site that has reconnected."""
        for opened in self._open.values():
            if opened.collection.is_waiting_for(connection.client_id):
                self._send(opened, connection)
        for request in self._secure.values():
            request.joined(connection.client_id)

    def lost(self, client_id: ClientId, why: str) -> None:
        """Stop waiting for the answers of a lost site."""
        for opened in self._open.values():
            self._failed(opened, client_id, f"lost: {why}")
        for request in self._secure.values():
            request.gave_up(client_id, f"lost: {why}")

    def answered_in_sum(self, client_id: ClientId, message: pb.ClientMessage) -> None:
        """Handle the message of a member of a secure sum; one of a request that is over is dropped."""
        if (request := self._secure.get(name_of(message).round)) is not None:
            request.answered(client_id, message)

    async def answered(self, client_id: ClientId, message: pb.GiveStatistics) -> None:
        """Handle a site's answer, or its reason for none; an unexpected one is dropped unread."""
        if (request := self._secure.get(message.number)) is not None:  # its numbers alone are never read
            request.gave_up(client_id, printable(message.error[:DETAIL_MAX]) or NOT_IN_SUM)
            return
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

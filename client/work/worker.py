"""The runner of a real agent: the user's task in a supervised worker process or mesh of ranks, called from a thread.

The worker stays alive between jobs. If it dies the agent survives: the next job starts another worker. Only the task in
use has a live worker.
"""

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

from atoll.client.disk.state_directory import StateDirectory
from atoll.client.session.events import Sums
from atoll.client.work.data_away import said_of_data
from atoll.client.work.runner import (
    EvaluateOrder,
    MaskOrder,
    MessageOrder,
    Order,
    RunnerFailed,
    StatisticsOrder,
    Training,
    TrainOrder,
)
from atoll.ground.backoff import Temporary
from atoll.ground.noise.key import key_of
from atoll.ground.printable import conclusion
from atoll.ground.strict_json import ManifestError
from atoll.parallel.mesh_client.supervisor.crew import Crew
from atoll.protocol.settings import ConfigError
from atoll.protocol.site_statistics import from_plain
from atoll.protocol.threads import begin_on_thread, on_thread
from atoll.protocol.vocabulary import FailureReason
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.tensors.layout import Piece
from atoll.tensors.masked.encode import Encoded
from atoll.training.statistics.parts import SiteStatistics
from atoll.training.worker.process import Environment, Worker, WorkerCrashed, WorkerError, WorkerHung

logger = logging.getLogger(__name__)

Reread = Literal["run", "job", "never"]
"""When a site's data is read again: for each run, for each job, or never."""

DESCRIBE_TIMEOUT_S = 600.0
ANSWER_SLACK_S = 5.0
"""Time beyond the lease that the agent waits for an answer [s], so that the worker's own alarm fires first."""

MASK_TIMEOUT_S = 3600.0
"""Longest wait for the ranks that mask an update [s]; what their session no longer needs is dropped."""

STOP_AGAIN_S = 1.0
"""Seconds after which a stop is repeated until the job ends; a stop sent before the worker starts the job is lost."""


class DataAway(Temporary, ConfigError):
    """Error: a task's data cannot be read now but may be later; a supervisor restarts the agent."""


def workers_of(
    tasks: Mapping[str, str],
    *,
    site: str,
    state: StateDirectory,
    threads: int | None = None,
    device: str = "cpu",
    settings: Mapping[str, Any] | None = None,
    environment: Environment = Environment(),  # noqa: B008 - frozen
) -> dict[str, Worker]:
    """Return a worker of one process for each task, by its name.

    Args:
        tasks: references of the tasks, by name.
        site: name of the site whose data the tasks load.
        state: the agent's directory, for the logs.
        threads: threads of the training; None: the number that torch chooses.
        device: "auto", "cpu" or "cuda".
        settings: the site's own settings for its tasks.
        environment: the interpreter, and the seconds within which a worker must have loaded its task.
    """
    return {
        name: Worker(
            reference,
            log_path=state.worker_log(name),
            site=site,
            threads=threads,
            device=device,
            settings=settings,
            environment=replace(environment, noise=key_of(state.noise_secret, "task", name, site)),
        )
        for name, reference in tasks.items()
    }


class WorkerRunner:
    """Runner of the jobs of several tasks at one site; see `Runner`.

    Args:
        tasks: references of the tasks, by name.
        workers: the worker of each task: one process, or a crew (the ranks of a mesh).
        state: the agent's directory, for the logs.
        lease: seconds that a worker may outlive its budget before it is killed.
        settings: the site's own settings for its tasks.
        reread: when the data are read again.
    """

    def __init__(
        self,
        tasks: Mapping[str, str],
        workers: Mapping[str, Worker | Crew],
        *,
        state: StateDirectory,
        lease: float,
        settings: Mapping[str, Any] | None = None,
        reread: Reread = "run",
    ) -> None:
        self._readings = Readings(reread, state.path / "readings.json")
        self._references, self._log_path = dict(tasks), state.worker_log
        self._settings, self._workers = dict(settings or {}), dict(workers)
        self._lease = lease
        self._is_closed = False
        self._current: Worker | Crew | None = None
        self._until = math.inf
        self._is_stopping = False
        self._stop_again: asyncio.TimerHandle | None = None
        self._killing: asyncio.Future[None] | None = None

    async def describe(self) -> int:
        """Load every task once, and return the largest number of training examples; see `Runner`."""
        most, declared = 0, set[str]()
        mistakes, away = list[str](), list[str]()
        for name in self._workers:
            try:
                answer = await self._run(name, "describe", DESCRIBE_TIMEOUT_S, {})
            except RunnerFailed as error:
                place = f"(details in {self._log_path(name)})"
                for fault in _faults_of(error):
                    message = f"{self._references[name]}: the task cannot be used: {fault} {place}"
                    way_out = said_of_data(fault, self._references[name])
                    (away if way_out else mistakes).append(f"{message}: {way_out}" if way_out else message)
                continue
            most, declared = max(most, answer["num_examples"] or 0), declared.union(answer["settings"])
        if mistakes:
            raise ConfigError([*mistakes, *away])
        if away:
            raise DataAway(away)
        if unknown := sorted(self._settings.keys() - declared):
            known = ", ".join(sorted(declared)) or "none"
            tasks = ", ".join(self._references.values())
            raise ConfigError(
                [f"task.{name}: unknown key (known, from the settings of {tasks}: {known})" for name in unknown]
            )
        return most

    async def train(self, order: TrainOrder) -> Training:
        """Train in the task's worker; see `Runner`."""
        plain = () if order.codec else ("codec", "owed", "residual")
        request = _request(order, "encode", *plain)
        if order.encode is not None and isinstance(self._workers[order.task], Crew):
            encode = {"out": str(order.encode.out.absolute()), "rounding": order.encode.rounding.hex()}
            request |= {"secure": asdict(order.encode.encoding) | encode}
        answer = await self._run(order.task, "train", order.budget, request, order.run_id)
        return Training(
            pieces=_pieces(answer.get("pieces", ())),
            parts=tuple(_pieces(pieces) for pieces in answer.get("parts", ())),
            num_examples=answer["num_examples"],
            work=float(answer["work"]),
            statistics=_sums(answer["statistics"]),
            seconds=answer["seconds"],
            normalizer=float(answer.get("normalizer", 1.0)),
            effective_steps=float(answer.get("effective_steps", 1.0)),
            has_own=answer["has_own"],
            mesh=MeshUse.read(**answer["mesh"]) if "mesh" in answer else None,
            steps=int(answer.get("steps", 0)),
            encoded=_encoded(answer.get("encoded")),
        )

    async def message(self, order: MessageOrder) -> Training:
        """Answer a message in the task's worker; see `Runner`."""
        answer = await self._run(order.task, "message", order.budget, _request(order), order.run_id)
        return Training(
            pieces=_pieces(answer["pieces"]),
            num_examples=1,
            work=1.0,
            statistics={},
            seconds=answer["seconds"],
            has_own=answer["has_own"],
        )

    async def evaluate(self, order: EvaluateOrder) -> Sums | None:
        """Evaluate in the task's worker; see `Runner`."""
        request = _request(order) | {"split": "test"}
        answer = await self._run(order.task, "evaluate", order.budget, request, order.run_id)
        return None if answer["statistics"] is None else _sums(answer["statistics"])

    async def statistics(self, order: StatisticsOrder) -> SiteStatistics:
        """Make statistics in the task's worker; see `Runner`."""
        answer = await self._run(order.task, "statistics", order.budget, _request(order), order.run_id)
        try:
            return await on_thread(None, from_plain, answer["statistics"])
        except ManifestError as error:
            raise RunnerFailed(FailureReason.TASK_BROKEN, f"the statistics cannot be sent: {error}") from error

    async def mask(self, order: MaskOrder) -> tuple[tuple[Piece, ...], ...] | None:
        """Mask parts by the ranks that have loaded the task, if they are at rest; see `Runner`."""
        crew = self._workers.get(order.task)
        if not isinstance(crew, Crew) or self._current is not None:
            return None
        request: dict[str, Any] = {
            "layout": [(tensor.name, tensor.dtype, tensor.shape) for tensor in order.layout],
            "parts": [
                {
                    "encoded": str(part.encoded.absolute()),
                    "out": str(part.out.absolute()),
                    "pieces": [(p.tensor, p.dtype, p.offsets, p.lengths, p.sha256) for p in part.pieces],
                }
                for part in order.parts
            ],
            "streams": [(key.hex(), sign) for key, sign in order.streams],
        }
        if order.share is not None:
            request |= {"share": order.share.deviation, "streams": [*request["streams"], (order.share.key.hex(), 0)]}
        try:
            answer = await on_thread(None, partial(crew.call_at_rest, "mask", MASK_TIMEOUT_S, **request))
            return None if answer is None else tuple(_pieces(pieces) for pieces in answer["parts"])
        except (WorkerError, WorkerHung, WorkerCrashed, RuntimeError) as error:
            logger.warning("the ranks have not masked the update, so this process does: %s", error)
            return None

    def extend(self, budget: float) -> None:
        """Set the deadline of the running job to `budget` seconds from now."""
        self._until = time.monotonic() + budget
        if self._current is not None:
            self._current.tell("extend", budget_s=budget)

    def stop(self) -> None:
        """Ask the worker to end its job early, repeatedly until it has."""
        if self._current is not None:
            self._is_stopping = True
            self._current.tell("stop")
            self._stop_again = asyncio.get_running_loop().call_later(STOP_AGAIN_S, self.stop)

    def kill(self) -> None:
        """Kill the worker of the running job."""
        if self._current is not None:
            self._killing = begin_on_thread(None, self._current.kill)

    def run_ended(self, run_id: str) -> None:
        """Make the next job of the run read the data again."""
        self._readings.run_ended(run_id)

    async def close(self) -> None:
        """Kill all workers, and start no others."""
        self._is_closed = True
        await asyncio.gather(*(on_thread(None, worker.close) for worker in self._workers.values()))

    async def _run(
        self, task: str, op: str, budget: float, request: dict[str, Any], run_id: str = ""
    ) -> dict[str, Any]:
        """Send a request to the task's worker, which must answer within the budget and the lease."""
        if self._killing is not None:
            await asyncio.wait({self._killing})  # else it might kill the next process
            self._killing = None
        self._current, self._until, self._is_stopping = self._workers[task], time.monotonic() + budget, False
        if run_id:
            request = request | {"data": self._readings.of(task, run_id)}
        try:
            answer = await on_thread(None, self._call, self._workers[task], op, request)
            if run_id and op != "statistics":
                self._readings.note(task, run_id, answer.get("read", {}))
            return answer
        finally:
            self._current = None
            if self._stop_again is not None:
                self._stop_again.cancel()
                self._stop_again = None

    def _call(self, worker: Worker | Crew, op: str, request: dict[str, Any]) -> dict[str, Any]:
        """Call the worker, on a thread, and turn its errors into RunnerFailed."""
        for other in self._workers.values():
            if other is not worker:
                other.kill()
        try:
            worker.start()
            if self._is_stopping:
                raise RunnerFailed(FailureReason.OUT_OF_TIME, "the job was stopped before it began")
            budget = max(self._until - time.monotonic(), 0.001)
            timeout = budget + self._lease + ANSWER_SLACK_S
            answer = worker.call(op, timeout, budget_s=budget, lease_s=self._lease, **request)
            _log(answer.get("said", ()))
            return answer
        except WorkerError as error:
            _log(error.said)
            raise RunnerFailed(FailureReason(error.kind), error.detail) from error
        except WorkerHung as error:
            raise RunnerFailed(FailureReason.WORKER_HUNG, str(error)) from error
        except WorkerCrashed as error:
            raise RunnerFailed(FailureReason.WORKER_CRASHED, _detail_of(error)) from error
        except RuntimeError as error:
            if not self._is_closed:
                raise
            raise RunnerFailed(FailureReason.SHUTTING_DOWN, "the agent is being stopped") from error


def _request(order: Order, *left_out: str) -> dict[str, Any]:
    """Return the fields of an order in plain values, as a worker reads them, but those that `_run` is given."""
    left_out = ("task", "run_id", "budget", *left_out)
    return {each.name: _plain(getattr(order, each.name)) for each in fields(order) if each.name not in left_out}


def _plain(value: Any) -> Any:
    match value:
        case Path():
            return str(value.absolute())
        case bytes():
            return value.hex()
        case tuple():
            return [_plain(each) for each in value]
        case _:
            return value


def _log(said: Iterable[tuple[int, str]]) -> None:
    for level, sentence in said:
        logger.log(level, "%s", sentence)


def _pieces(fields: Iterable[Sequence[Any]]) -> tuple[Piece, ...]:
    return tuple(
        Piece(tensor, dtype, tuple(offsets), tuple(lengths), sha256, *encoded)
        for tensor, dtype, offsets, lengths, sha256, *encoded in fields
    )


def _encoded(fields: Mapping[str, Any] | None) -> Encoded | None:
    return (
        None
        if fields is None
        else Encoded((), float(fields["norm"]), float(fields["factor"]), tuple(fields["left_out"]))
    )


def _sums(statistics: Mapping[str, Any]) -> Sums:
    return {name: tuple(map(float, values)) for name, values in statistics.items()}


def _detail_of(error: WorkerCrashed) -> str:
    """Return the end of a worker's log, and then how the worker has ended, as a traceback puts it last.

    A long detail is truncated at its beginning, so its end must state the cause.
    """
    *_, last = "", *error.log_tail.splitlines()
    return f"{indent(error.log_tail, '  ')}\n{error.ending}{last and f'; its log ends: {last}'}".strip("\n")


def _faults_of(error: RunnerFailed) -> list[str]:
    """Return the faults of a task that does not load: one line for each faulty setting, one for a traceback."""
    lines = error.detail.splitlines()
    is_traceback = any(line.startswith(" ") for line in lines)
    return [conclusion(error.detail) or str(error.reason)] if is_traceback or not lines else lines


class Readings:
    """Names of the loads of the sites' data, and each task's newest row counts, which survive the process.

    Args:
        reread: the setting of the agent.
        path: file with the row counts of the last readings.
    """

    def __init__(self, reread: Reread, path: Path) -> None:
        self._reread, self._path = reread, path
        self._ends, self._jobs = Counter[str](), count(1)
        self._ended: set[str] = set()
        self._last: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            found = json.loads(path.read_text())
            self._last = found if isinstance(found, dict) else {}

    def of(self, task: str, run_id: str) -> str:
        """Return the name of the data load for a job; a worker without data under this name reads the data again."""
        if self._reread == "job":
            return f"job {next(self._jobs)}"
        return f"{run_id} {self._ends[run_id]}" if self._reread == "run" else "once"

    def run_ended(self, run_id: str) -> None:
        """Make later jobs of the run, after a resume, read the data again."""
        self._ends[run_id] += 1
        self._ended.add(run_id)

    def note(self, task: str, run_id: str, rows: Mapping[str, int]) -> None:
        """Record the rows of each split that a job has read; warn if an earlier process read them for the same run."""
        if not rows:
            return
        last = self._last.get(task)
        before = last["rows"] if isinstance(last, dict) and last.get("run") == run_id else {}
        again = [f"{rows[split]} of {split} ({before[split]} before)" for split in rows if split in before]
        if again and run_id not in self._ended and self._reread != "job":
            text = "run %s has read its data again during the run: rows %s"
            logger.warning(text, run_id, ", ".join(again), extra={"run": run_id})
        self._ended.discard(run_id)
        self._last[task] = {"run": run_id, "rows": {**before, **rows}}
        with suppress(OSError):  # the next process then does not know the reading
            self._path.write_text(json.dumps(self._last))

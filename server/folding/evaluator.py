"""The coordinator's worker process, which makes version 0 and evaluates versions on the server's data.

The user's code and torch run there: so the coordinator's process stays small, starts fast, and survives the errors of a
task. A worker that crashes or hangs costs one evaluation, never a round.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.protocol.threads import begin_on_thread
from atoll.server.rounds.events import Sums
from atoll.task.apps import is_app
from atoll.task.metrics import values
from atoll.tensors.layout import Piece
from atoll.training.worker.bench import Measures
from atoll.training.worker.process import (
    LOAD_TIMEOUT_S,
    Environment,
    RunTerms,
    Worker,
    WorkerCrashed,
    WorkerError,
    WorkerHung,
)
from atoll.training.worker.warm_start import Start

logger = logging.getLogger(__name__)

APP, CONCLUDED = "app", "app.concluded"
"""Current folder of a Flower app's `main()` in the folder of a run, and the file that records its end."""

MAIN_TIMEOUT_S = 24 * 3600.0
"""Seconds that each part of a Flower app's `main()` may take: the part up to `start`, an `evaluate_fn`, the rest."""

TASK_TIMEOUT_S = 600.0
"""Seconds that one request to the worker may take."""


class EvaluationFailed(RuntimeError):
    """Error: the task's code failed, crashed or hung; the message is for the operator."""


def detail_of(error: Exception) -> str:
    """Return an error's text for the journal; undecodable bytes of a file's name are replaced."""
    kind = "" if isinstance(error, EvaluationFailed) else f"{type(error).__name__}: "
    return f"{kind}{error}"[:2000].encode(errors="replace").decode()


@dataclass(frozen=True, slots=True)
class Reference:
    """Operator's reference to a task, with its settings."""

    task: str
    local: dict[str, Any]
    algorithm: str = "fedavg"
    seed: int = 0
    """The seed of the run."""
    rounds: int = 1
    """The number of rounds for which the settings must fit."""


class Evaluator:
    """Warm worker process that serves one request at a time, from a separate thread."""

    def __init__(
        self,
        reference: Reference,
        log_path: Path,
        *,
        timeout_s: float,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        noise: bytes = b"",
        run_number: int = 0,
    ) -> None:
        self._worker = Worker(
            reference.task,
            log_path=log_path,
            run=RunTerms(reference.local, reference.algorithm, reference.rounds, run_number),
            environment=Environment(folder=log_path.parent / APP, load_timeout_s=load_timeout_s, noise=noise),
        )
        self._concluded = log_path.parent / CONCLUDED if is_app(reference.task) else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluator")
        self._timeout_s = timeout_s if self._concluded is None else MAIN_TIMEOUT_S
        self._seed = reference.seed
        self._own: frozenset[str] | None = None
        """Names of the metrics whose value is not a ratio; None: not known yet."""
        self.frozen = ""
        """Digest of the tensors of version 0's model that are never sent; empty: all are sent."""
        self.cannot = ""
        """Reason why the server cannot evaluate any version, once it is known; empty: it can."""

    async def check(self) -> None:
        """Load the task, so that the operator learns of its faults at once.

        Raises:
            EvaluationFailed: the task cannot be loaded.
        """
        await self._call(self._worker.start)

    async def try_out(self) -> None:
        """Try the task on a batch of the server's data.

        Raises:
            EvaluationFailed: no version could be evaluated, or a metric would be omitted.
        """
        await self._ask("try_out")

    async def write_initial(self, out: Path, seed: int, start: Start | None = None) -> tuple[Piece, ...]:
        """Write version 0 from the task's model, seeded, or from the values of a file, and return its pieces.

        Raises:
            EvaluationFailed: the task fails, or the file does not fit its model.
        """
        given = {} if start is None else {"start": str(start.path), "strict": start.is_strict}
        answer = await self._ask("initial", seed=seed, out=str(out), **given)
        if answer["note"]:
            logger.warning("version 0 is from %s: %s", given["start"], answer["note"])
        self.frozen = answer["frozen"]
        return tuple(Piece(t, d, tuple(o), tuple(n), s) for t, d, o, n, s in answer["pieces"])

    async def evaluate(self, model: Path, version: int) -> Sums | str:
        """Return the sufficient statistics of a version on the server's data, or the reason why there are none."""
        answer = await self._ask("evaluate", model=str(model), split="server", model_seed=self._seed, version=version)
        if answer["statistics"] is None:
            self.cannot = str(answer["reason"])
            return self.cannot
        return {name: tuple(values) for name, values in answer["statistics"].items()}

    async def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of the task's model."""
        return {name: tuple(shape) for name, _, shape in (await self._ask("describe"))["layout"]}

    async def measures(self) -> Measures:
        """Return the metrics that an evaluation by the task measures."""
        answer = await self._ask("measures")
        return Measures(None if answer["names"] is None else tuple(answer["names"]), answer["why_not_here"])

    async def no_statistics(self) -> str:
        """Return the reason why the task has no statistics of a site's data; empty: it may have some."""
        return str((await self._ask("statistics", only_whether=True))["why_not"])

    async def values(self, sums: Sums) -> dict[str, float | None]:
        """Return the values of the task's custom metrics for sums of sufficient statistics."""
        values: dict[str, float | None] = (await self._ask("values", statistics=dict(sums)))["values"]
        return values

    async def values_of(self, many: Sequence[Sums]) -> list[dict[str, float | None]]:
        """Return the values of the metrics for each of many sums; ratios of two sums need no worker."""
        if not many:
            return []
        if self._own is None:
            self._own = frozenset((await self._ask("measures"))["own"])
        if all(name not in self._own and len(part) in (0, 2) for sums in many for name, part in sums.items()):
            return [values({}, sums) for sums in many]
        found: list[dict[str, float | None]] = (await self._ask("values_of", statistics=list(map(dict, many))))[
            "values"
        ]
        return found

    @property
    def has_main(self) -> bool:
        """Whether the task is a Flower app whose `main()` has to continue after the last round."""
        return self._concluded is not None and not self._concluded.exists()

    async def conclude(self, model: Path, history: Mapping[str, Any]) -> None:
        """Run the rest of a Flower app's `main()`, which gets the result of the run.

        Args:
            model: the last version.
            history: metrics by kind ("train", "clients", "server"), round and name.

        Raises:
            EvaluationFailed: `main()` fails; it is not called again, and the file of its end has the reason.
        """
        assert self._concluded is not None
        failure = ""
        try:
            await self._call(
                lambda: self._worker.call("conclude", MAIN_TIMEOUT_S, model=str(model), history=dict(history))
            )
        except EvaluationFailed as error:
            failure = str(error)
            raise
        finally:
            self._concluded.write_text(failure, encoding="utf-8", errors="backslashreplace")

    async def rest(self) -> None:
        """End the process to free its memory; the next request starts a new one."""
        await self._call(self._worker.kill)

    def close(self) -> None:
        """End the worker for good."""
        self._worker.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, op: str, **args: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call(lambda: self._worker.call(op, self._timeout_s, **args))
        return answer

    async def _call(self, function: Any) -> Any:
        try:
            return await begin_on_thread(self._thread, function)
        except WorkerError as fault:
            raise EvaluationFailed(fault.detail) from fault
        except (WorkerCrashed, WorkerHung, OSError) as fault:  # OSError: the process cannot be started
            raise EvaluationFailed(str(fault)) from fault

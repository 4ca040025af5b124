"""The coordinator's worker process: it makes version 0 and runs versions on the server's own data.

The user's code, and torch, live there: the coordinator's process stays small, starts fast, and survives what the task
does. A worker that crashes or hangs costs one evaluation, never a round.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.aggregation.tensors.layout import Piece
from atoll.parallel.worker.process import Worker, WorkerCrashed, WorkerError, WorkerHung
from atoll.server.rounds.events import Sums

logger = logging.getLogger(__name__)

TASK_TIMEOUT_S = 600.0


class EvaluationFailed(RuntimeError):
    """The task's code failed, crashed or hung; the message is for the operator."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A task, as its operator named it."""

    task: str
    local: dict[str, Any]
    algorithm: str = "fedavg"


class Evaluator:
    """One warm worker, one request at a time, on a thread of its own."""

    def __init__(self, reference: Reference, log_path: Path, *, timeout_s: float) -> None:
        self._worker = Worker(reference.task, log_path=log_path, local=reference.local, algorithm=reference.algorithm)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluator")
        self._timeout_s = timeout_s
        self.cannot = ""
        """Why the server can measure no version, once that was found; empty: it can."""

    async def check(self) -> None:
        """Load the task: what is wrong with it is the operator's to know at once."""
        await self._call(self._worker.start)

    async def write_initial(self, out: Path, seed: int) -> tuple[Piece, ...]:
        """Make version 0 from the task's model, seeded."""
        answer = await self._ask("initial", seed=seed, out=str(out))
        return tuple(Piece(t, d, tuple(o), tuple(n), s) for t, d, o, n, s in answer["pieces"])

    async def evaluate(self, model: Path) -> Sums | str:
        """Sufficient statistics of a version on the server's data, or why there are none."""
        answer = await self._ask("evaluate", model=str(model), split="server")
        if answer["statistics"] is None:
            self.cannot = str(answer["reason"])
            return self.cannot
        return {name: tuple(values) for name, values in answer["statistics"].items()}

    async def values(self, sums: Sums) -> dict[str, float | None]:
        """What the task's own metrics make of the sums."""
        values: dict[str, float | None] = (await self._ask("values", statistics=dict(sums)))["values"]
        return values

    async def rest(self) -> None:
        """End the process, and its memory; the next request starts another."""
        await self._call(self._worker.kill)

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, op: str, **args: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call(lambda: self._worker.call(op, self._timeout_s, **args))
        return answer

    async def _call(self, function: Any) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except WorkerError as fault:
            raise EvaluationFailed(fault.detail) from fault
        except (WorkerCrashed, WorkerHung, OSError) as fault:  # OSError: the process cannot be started
            raise EvaluationFailed(str(fault)) from fault

"""The runner of a real agent: the user's task in a supervised worker process, called through a thread.

The worker stays warm between jobs. One that died is started again by the next job: never the agent's end. Of several
tasks only the one in use has a living worker.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any

from atoll.aggregation.tensors.layout import Piece
from atoll.client.disk.state_directory import StateDirectory
from atoll.client.session.events import Sums
from atoll.client.work.runner import EvaluateOrder, RunnerFailed, Training, TrainOrder
from atoll.parallel.worker.process import Worker, WorkerCrashed, WorkerError, WorkerHung
from atoll.protocol.settings import ConfigError
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import FailureReason

DESCRIBE_TIMEOUT_S = 600.0
ANSWER_SLACK_S = 5.0
"""Beyond the lease, so that the worker's own alarm goes first."""

STOP_AGAIN_S = 1.0
"""A stop that crosses the request to train on its way is lost: it is said again until the job ends."""


class WorkerRunner:
    """Runs jobs of some tasks, by name, at one site. See `Runner`."""

    def __init__(
        self,
        tasks: Mapping[str, str],
        *,
        site: str,
        state: StateDirectory,
        lease: float,
        threads: int | None = None,
        device: str = "cpu",
    ) -> None:
        self._references, self._log_path = dict(tasks), state.worker_log
        self._workers = {
            name: Worker(reference, log_path=self._log_path(name), site=site, threads=threads, device=device)
            for name, reference in tasks.items()
        }
        self._lease = lease
        self._is_closed = False
        self._current: Worker | None = None
        self._until = math.inf
        self._is_stopping = False
        self._say_stop: asyncio.TimerHandle | None = None
        self._killing: asyncio.Future[None] | None = None

    async def describe(self) -> int:
        """Load every task once; see `Runner`."""
        most = 0
        for name in self._workers:
            try:
                answer = await self._run(name, "describe", DESCRIBE_TIMEOUT_S, {})
            except RunnerFailed as error:
                last = error.detail.strip().splitlines()[-1:] or [error.reason]
                message = (
                    f"{self._references[name]}: the task cannot be used: {last[0]} (more in {self._log_path(name)})"
                )
                raise ConfigError([message]) from error
            most = max(most, answer["num_examples"] or 0)
        return most

    async def train(self, order: TrainOrder) -> Training:
        """See `Runner`."""
        request = {
            "model": str(order.model.absolute()),
            "out": str(order.out.absolute()),
            "seed": order.seed,
            "round_id": order.round_id,
            "local": dict(order.local),
            "algorithm": order.algorithm,
            "own": str(order.own.absolute()) if order.own else None,
            "own_out": str(order.own_out.absolute()),
            "model_seed": order.model_seed,
        }
        if order.codec:
            request |= {"codec": order.codec, "owed": [str(path.absolute()) for path in order.owed]}
            request |= {"residual": str(order.residual.absolute())} if order.residual else {}
        answer = await self._run(order.task, "train", order.budget, request)
        return Training(
            pieces=tuple(
                Piece(tensor, dtype, tuple(offsets), tuple(lengths), sha256, *encoded)
                for tensor, dtype, offsets, lengths, sha256, *encoded in answer["pieces"]
            ),
            num_examples=answer["num_examples"],
            work=float(answer["work"]),
            statistics=_sums(answer["statistics"]),
            seconds=answer["seconds"],
            normalizer=float(answer.get("normalizer", 1.0)),
            effective_steps=float(answer.get("effective_steps", 1.0)),
            has_own=answer["has_own"],
        )

    async def evaluate(self, order: EvaluateOrder) -> Sums | None:
        """See `Runner`."""
        request = {
            "model": str(order.model.absolute()),
            "split": "test",
            "local": dict(order.local),
            "own": str(order.own.absolute()) if order.own else None,
            "model_seed": order.model_seed,
        }
        answer = await self._run(order.task, "evaluate", order.budget, request)
        return None if answer["statistics"] is None else _sums(answer["statistics"])

    def extend(self, budget: float) -> None:
        """See `Runner`."""
        self._until = time.monotonic() + budget
        if self._current is not None:
            self._current.tell("extend", budget_s=budget)

    def stop(self) -> None:
        """See `Runner`."""
        if self._current is not None:
            self._is_stopping = True
            self._current.tell("stop")
            self._say_stop = asyncio.get_running_loop().call_later(STOP_AGAIN_S, self.stop)

    def kill(self) -> None:
        """See `Runner`."""
        if self._current is not None:
            self._killing = asyncio.get_running_loop().run_in_executor(None, self._current.kill)

    async def close(self) -> None:
        """See `Runner`."""
        self._is_closed = True
        await asyncio.gather(*(on_thread(None, worker.close) for worker in self._workers.values()))

    async def _run(self, task: str, op: str, budget: float, request: dict[str, Any]) -> dict[str, Any]:
        """One request to the task's worker, which must answer within the budget and the lease."""
        if self._killing is not None:
            await asyncio.wait({self._killing})  # it must not hit the next process
            self._killing = None
        self._current, self._until, self._is_stopping = self._workers[task], time.monotonic() + budget, False
        try:
            return await on_thread(None, self._call, self._workers[task], op, request)
        finally:
            self._current = None
            if self._say_stop is not None:
                self._say_stop.cancel()
                self._say_stop = None

    def _call(self, worker: Worker, op: str, request: dict[str, Any]) -> dict[str, Any]:
        """On a thread: the worker's words become the protocol's."""
        for other in self._workers.values():
            if other is not worker:
                other.kill()
        try:
            worker.start()
            if self._is_stopping:
                raise RunnerFailed(FailureReason.OUT_OF_TIME, "it was to stop before it had begun")
            budget = max(self._until - time.monotonic(), 0.001)
            timeout = budget + self._lease + ANSWER_SLACK_S
            return worker.call(op, timeout, budget_s=budget, lease_s=self._lease, **request)
        except WorkerError as error:
            raise RunnerFailed(FailureReason(error.kind), error.detail) from error
        except WorkerHung as error:
            raise RunnerFailed(FailureReason.WORKER_HUNG, str(error)) from error
        except WorkerCrashed as error:
            raise RunnerFailed(FailureReason.WORKER_CRASHED, str(error)) from error
        except RuntimeError as error:
            if not self._is_closed:
                raise
            raise RunnerFailed(FailureReason.SHUTTING_DOWN, "the agent is being stopped") from error


def _sums(statistics: Mapping[str, Any]) -> Sums:
    return {name: tuple(map(float, values)) for name, values in statistics.items()}

"""The engine of several processes: each trains windows of the cohort, with the same bits however many there are.

Workers are forked where that is safe, so that a task may be any object and its data lies in memory once. On a GPU, and
for several threads in each, they come from a fork server, and the task has to be one that can be pickled: the files of
the user's that it needs go with it. Jobs go out by their names; versions, updates and what clients keep lie in shared
memory.
"""

import multiprocessing
import os
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import Any

import torch

from atoll.parallel.task.arrays import Arrays, check_like
from atoll.simulations.engines.engine import ClientFailed, Failed, Job, Trained, Training
from atoll.simulations.engines.one_process import on_device
from atoll.simulations.engines.processes.crew import Plan, Sent, Written, plan_of, work
from atoll.simulations.engines.processes.user_files import Parcel
from atoll.simulations.engines.rows import Form, Rows
from atoll.simulations.engines.shared import Blocks, mapped, new_file

PRELOAD = ["torch", "atoll.simulations.engines.processes.crew"]

AHEAD = 2
"""Windows that a worker has been given at one time: it need not wait for the next."""

HELD = 4
"""Windows for each worker that may be done, or begun, before the first of them is taken."""

START_TIMEOUT_S = 120.0


class WorkerDied(RuntimeError):
    """A worker process of an engine has ended; the engine is closed."""


class Processes:
    """Several processes, sequential or batched in each.

    Args:
        training: of all clients.
        workers: processes; None: one for each processor that we may use.
        batched: whether each trains many clients in one product.
        at_once: clients in a product; None: as many as the cache holds.
        threads: of each operation.

    Raises:
        CannotBatch: `batched` is set, and it cannot be.
        WorkerDied: a worker could not start; with its traceback.
    """

    def __init__(
        self,
        training: Training,
        *,
        workers: int | None = None,
        batched: bool = False,
        at_once: int | None = None,
        threads: int = 1,
    ) -> None:
        count = workers or len(os.sched_getaffinity(0))
        plan, self._planner = plan_of(training, batched, at_once, threads=threads)
        kind = f"batched (k={plan.at_once}), " if plan.at_once else ""
        self.name = on_device(f"{kind}{count} processes", training)
        self._form = self._planner.form
        self._plan, self._count = plan, count
        self._workers: list[_Worker] = []
        self._version_form = Form(self._form.update, ())
        size = Rows.num_bytes(self._version_form, 1)
        self._descriptor = new_file(size)
        self._version = Rows(self._version_form, 1, mapped(self._descriptor, size))
        self._num_versions = 0

    def train(self, version: Arrays, jobs: Sequence[Job]) -> Iterator[Trained | Failed]:
        """As `Engine.train`. Windows are trained ahead of the one that is taken, up to a few for each worker."""
        check_like(version, self._form.update)
        self._start()
        self._version.write(0, version, None)
        self._num_versions += 1
        size = self._planner.window(len(jobs))
        windows = [jobs[first : first + size] for first in range(0, len(jobs), size)]
        yield from self._collect(deque(enumerate(windows)), len(windows))

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _give(self, waiting: "deque[tuple[int, Sequence[Job]]]", taken: int) -> None:
        """Hand out windows, as many as the workers take when so many have been taken."""
        while waiting and waiting[0][0] < taken + HELD * len(self._workers):
            worker = min(self._workers, key=lambda each: len(each.tasks))
            if len(worker.tasks) >= AHEAD:
                return
            number, jobs = waiting.popleft()
            worker.give(number, self._num_versions, jobs)

    def _collect(self, waiting: "deque[tuple[int, Sequence[Job]]]", total: int) -> Iterator[Trained | Failed]:
        done: dict[int, list[Trained | Failed]] = {}
        try:
            for number in range(total):
                self._give(waiting, number)
                while number not in done:
                    done |= self._receive()
                    self._give(waiting, number)
                yield from done.pop(number)
        finally:
            self._drain()

    def _receive(self) -> dict[int, list[Trained | Failed]]:
        """What workers have done, as soon as one has done something."""
        busy = [worker for worker in self._workers if worker.tasks]
        wait([each for worker in busy for each in (worker.connection, worker.process.sentinel)])
        done = {}
        for worker in busy:
            while worker.tasks and worker.connection.poll():
                number, results = worker.result()
                done[number] = results
            if worker.tasks and not worker.process.is_alive() and not worker.connection.poll():
                self.close()
                raise worker.died()
        return done

    def _drain(self) -> None:
        """Let the workers end what was given to them and nobody takes."""
        for worker in self._workers:
            while worker.tasks:
                try:
                    worker.result()
                except ClientFailed:
                    continue
                except WorkerDied:
                    self.close()
                    return

    def _start(self) -> None:
        """The workers, where there are none."""
        if self._workers:
            return
        try:
            for _ in range(self._count):
                self._workers.append(_Worker(self._plan, self._form, self._descriptor))
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        if getattr(self, "_workers", None):
            self.close()
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class _Worker:
    """One process, seen from the engine."""

    def __init__(self, plan: Plan, form: Form, version: int) -> None:
        method = "fork" if _can_fork(plan) else "forkserver"
        context: Any = multiprocessing.get_context(method)
        self.connection, theirs = context.Pipe()
        self._blocks = Blocks(form, is_shared=True)
        self.tasks: deque[tuple[int, Rows]] = deque()
        """What it has been given: the number of the window, and where its results will lie."""
        told, known = (plan, version) if method == "fork" else (Parcel(plan), -1)
        self.process = context.Process(target=work, args=(theirs, told, form, known), daemon=True, name="atoll-engine")
        if method == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        with warnings.catch_warnings():  # newer Pythons warn of threads: the child uses none that the parent had
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self.process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ClientFailed(f"the task cannot be sent to another process, as {method} needs: {error}") from error
        theirs.close()
        if known < 0:
            reduction.send_handle(self.connection, version, self.process.pid)

    def wait_until_ready(self) -> None:
        """Raises WorkerDied when it does not come up."""
        if not self.connection.poll(START_TIMEOUT_S):
            raise WorkerDied(f"a worker was not ready after {START_TIMEOUT_S} s")
        self._answer()

    def send(self, message: Any) -> None:
        """Raises WorkerDied when nobody is there."""
        try:
            self.connection.send(message)
        except OSError:
            raise self.died() from None

    def give(self, number: int, version: int, jobs: Sequence[Job]) -> None:
        """Hand out a window of those that train from this version."""
        block, rows, descriptor = self._blocks.take(len(jobs))
        if descriptor is not None:
            self.send(("block", block, len(jobs)))
            reduction.send_handle(self.connection, descriptor, self.process.pid)
            os.close(descriptor)
        for index, job in enumerate(jobs):
            if job.own is not None:
                rows.write(index, {}, job.own)
        self.send(("train", version, block, [Sent.of(job) for job in jobs]))
        self.tasks.append((number, rows))

    def result(self) -> tuple[int, list[Trained | Failed]]:
        """The results of the window that was given first.

        Raises:
            ClientFailed: as the worker told.
            WorkerDied: it has ended.
        """
        number, rows = self.tasks.popleft()
        results: list[Written | Failed] = self._answer()[1]
        return number, [
            result if isinstance(result, Failed) else result.read(rows, index) for index, result in enumerate(results)
        ]

    def died(self) -> WorkerDied:
        """What to raise."""
        self.process.join(5)
        code = self.process.exitcode
        ending = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return WorkerDied(f"worker process {self.process.pid} {ending}")

    def end(self) -> None:
        """At once: nothing that it has not handed in counts."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _answer(self) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self.died() from None
        if answer[0] == "failed":
            raise ClientFailed(answer[1])
        return answer


def _can_fork(plan: Plan) -> bool:
    """Linux alone forks safely. A process that has begun with CUDA does not; nor may its child use several threads: it
    would wait for ever for those of OpenMP that its parent had."""
    is_plain = plan.threads == 1 and plan.training.device == "cpu"
    return is_plain and sys.platform == "linux" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]

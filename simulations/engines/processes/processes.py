"""The engine of several processes: each trains windows of the cohort, with the same bits for any number of processes.

Workers are forked if that is safe, so that a task may be any object and its data is in memory once. For a GPU, and for
several threads in each worker, they come from a fork server, and the task must be picklable: the user's files that it
needs are sent with it. Messages contain only names; versions, updates and the clients' states are in shared memory.
"""

import multiprocessing
import os
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import Any

import torch

from atoll.ground.printable import count_of
from atoll.ground.process.forking import leaving_garbage
from atoll.parallel.engine.forked import FROZEN
from atoll.simulations.engines.engine import ClientFailed, Failed, Job, Trained, Training
from atoll.simulations.engines.measuring import windows_of
from atoll.simulations.engines.one_process import on_device
from atoll.simulations.engines.processes.placement import VISIBLE, placed, visible
from atoll.simulations.engines.processes.user_files import Parcel
from atoll.simulations.engines.processes.worker import Plan, Sent, plan_of, work
from atoll.simulations.engines.rows import Form, Rows
from atoll.simulations.engines.shared_memory import Blocks, mapped, new_file
from atoll.task.arrays import Arrays, check_like
from atoll.task.metrics import Statistics

PRELOAD = ["torch", "atoll.simulations.engines.processes.worker"]

AHEAD = 2
"""Maximum number of windows in a worker's queue, so that it need not wait for the next one."""

WINDOWS_MAX = 4
"""Maximum number of windows per worker that are started or finished, but not yet taken from the engine."""

START_TIMEOUT_S = 120.0


class WorkerDied(RuntimeError):
    """Error: a worker process of an engine has ended; the engine is closed."""


class Processes:
    """Engine of several processes with a sequential or a batched trainer in each.

    Args:
        training: the settings of all clients' training.
        workers: the number of processes; None: one for each available processor.
        batched: True if each process trains many clients as one group.
        at_once: the number of clients in a group; None: as many as fit into the cache.
        threads: the threads of each operation.
        devices: the GPUs, by their numbers here, on which the processes take turns if they compute on GPUs; empty: all.

    Raises:
        CannotBatch: `batched` is set, and the task cannot be batched.
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
        devices: Sequence[int] = (),
    ) -> None:
        count = workers or len(os.sched_getaffinity(0))
        plan, self._planner = plan_of(training, batched, at_once, threads=threads)
        kind = f"batched (k={plan.at_once}), " if plan.at_once else ""
        self.name = on_device(f"{kind}{count_of(count, 'process', 'processes')}", training)
        self._form = self._planner.form
        self._plan, self._seen = plan, _seen_by_each(count, training.device, devices)
        self._workers: list[_Worker] = []
        self._version_form = Form((), self._form.update)  # as in the worker
        size = Rows.num_bytes(self._version_form, 1)
        self._descriptor = new_file(size)
        self._version = Rows(self._version_form, 1, mapped(self._descriptor, size))
        self._num_versions = 0

    def train(self, version: Arrays, jobs: Sequence[Job]) -> Iterator[Trained | Failed]:
        """Train the clients, as `Engine.train`; windows are trained ahead of demand, up to `WINDOWS_MAX` per worker."""
        check_like(version, self._form.update)
        self._start()
        self._version.write(0, {}, version)
        self._num_versions += 1
        size = self._planner.window(len(jobs))
        windows = [jobs[first : first + size] for first in range(0, len(jobs), size)]
        yield from self._collect(deque(enumerate(windows)), len(windows), _Worker.give)

    def evaluate(self, version: Arrays, jobs: Sequence[Job]) -> list[Statistics | str]:
        """Evaluate the clients, as `Engine.evaluate`."""
        check_like(version, self._form.update)
        self._start()
        self._version.write(0, {}, version)
        self._num_versions += 1
        windows = windows_of(jobs)
        found = self._collect(deque(enumerate(windows)), len(windows), _Worker.measure, ahead=1)  # the queue has arrays
        return list(found)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _give(self, waiting: "deque[tuple[int, Sequence[Job]]]", taken: int, give: "Give", ahead: int) -> None:
        """Give windows to the workers as far as their queues and the number of taken windows allow."""
        while waiting and waiting[0][0] < taken + WINDOWS_MAX * len(self._workers):
            worker = min(self._workers, key=lambda each: len(each.tasks))
            if len(worker.tasks) >= ahead:
                return
            number, jobs = waiting.popleft()
            give(worker, number, self._num_versions, jobs)

    def _collect(
        self, waiting: "deque[tuple[int, Sequence[Job]]]", total: int, give: "Give", ahead: int = AHEAD
    ) -> Iterator[Any]:
        done: dict[int, list[Any]] = {}
        try:
            for number in range(total):
                self._give(waiting, number, give, ahead)
                while number not in done:
                    done |= self._receive()
                    self._give(waiting, number, give, ahead)
                yield from done.pop(number)
        finally:
            self._drain()

    def _receive(self) -> dict[int, list[Any]]:
        """Wait for a result, and return the results of all finished windows by number."""
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
        """Wait for the workers to finish their queues, and discard the results."""
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
        """Start the workers if there are none."""
        if self._workers:
            return
        try:
            for seen in self._seen:
                self._workers.append(_Worker(self._plan, self._form, self._descriptor, seen))
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
    """The engine's side of one worker process.

    Args:
        plan: the plan of its trainer.
        form: the form of the results.
        version: the descriptor of the version's memory.
        seen: environment variables that limit it to its GPU; empty if it is forked.
    """

    def __init__(self, plan: Plan, form: Form, version: int, seen: Mapping[str, str]) -> None:
        method = "fork" if _can_fork(plan) else "forkserver"
        context: Any = multiprocessing.get_context(method)
        self.connection, theirs = context.Pipe()
        self._blocks = Blocks(form, is_shared=True)
        self.tasks: deque[tuple[int, Rows | None]] = deque()
        """Queue of windows: the number of each, and the rows for its results; None: the results are sums."""
        sent_plan, descriptor = (plan, version) if method == "fork" else (Parcel(plan, seen), -1)
        arguments = (theirs, sent_plan, form, descriptor)
        self.process = context.Process(target=work, args=arguments, daemon=True, name="atoll-engine")
        if method == "forkserver":
            context.set_forkserver_preload([*PRELOAD, FROZEN])
        with warnings.catch_warnings():  # newer Pythons warn of threads, but the child uses none of the parent's
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                with leaving_garbage():
                    self.process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ClientFailed(f"the task cannot be sent to another process, as {method} needs: {error}") from error
        theirs.close()
        if descriptor < 0:
            reduction.send_handle(self.connection, version, self.process.pid)

    def wait_until_ready(self) -> None:
        """Wait for the start of the process; raise WorkerDied if it fails or takes too long."""
        if not self.connection.poll(START_TIMEOUT_S):
            raise WorkerDied(f"a worker was not ready after {START_TIMEOUT_S} s")
        self._answer()

    def send(self, message: Any) -> None:
        """Send a message; raise WorkerDied if the process has ended."""
        try:
            self.connection.send(message)
        except OSError:
            raise self.died() from None

    def give(self, number: int, version: int, jobs: Sequence[Job]) -> None:
        """Give a window of jobs that train from this version to the process."""
        block, rows, descriptor = self._blocks.take(len(jobs))
        if descriptor is not None:
            self.send(("block", block, len(jobs)))
            reduction.send_handle(self.connection, descriptor, self.process.pid)
            os.close(descriptor)
        self.send(("train", version, block, [Sent.of(job, rows, index) for index, job in enumerate(jobs)]))
        self.tasks.append((number, rows))

    def measure(self, number: int, version: int, jobs: Sequence[Job]) -> None:
        """Give a window of jobs that evaluate this version to the process."""
        self.send(("measure", version, jobs))
        self.tasks.append((number, None))

    def result(self) -> tuple[int, list[Any]]:
        """Return the number and the results of the first window in the queue.

        Raises:
            ClientFailed: the task's code failed in the worker.
            WorkerDied: the process has ended.
        """
        number, rows = self.tasks.popleft()
        results: list[Any] = self._answer()[1]
        if rows is None:
            return number, results
        return number, [
            result if isinstance(result, Failed) else result.read(rows, index) for index, result in enumerate(results)
        ]

    def died(self) -> WorkerDied:
        """Return the error that describes how the process ended."""
        self.process.join(5)
        code = self.process.exitcode
        ending = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return WorkerDied(f"worker process {self.process.pid} {ending}")

    def end(self) -> None:
        """Kill the process; its unfinished windows are lost."""
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


Give = Callable[[_Worker, int, int, Sequence[Job]], None]
"""Function that gives a worker the window of a number, from the version of a number."""


def _seen_by_each(count: int, device: str, devices: Sequence[int]) -> list[dict[str, str]]:
    """Return each process's environment that limits it to its GPU."""
    if device == "cpu":
        return [{}] * count
    numbers = placed(count, devices or range(torch.cuda.device_count()))
    return [{VISIBLE: visible(number, os.environ.get(VISIBLE))} for number in numbers]


def _can_fork(plan: Plan) -> bool:
    """Return whether workers can be forked safely: on Linux, without CUDA, and with one thread in each.

    A process that uses CUDA cannot be forked. A child with several threads would wait forever for the OpenMP threads of
    its parent.
    """
    is_plain = plan.threads == 1 and plan.training.device == "cpu"
    return is_plain and sys.platform == "linux" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]

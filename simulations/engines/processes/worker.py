"""A worker process of an engine: it trains windows of clients into shared memory.

Messages to it, each a tuple that begins with its kind:

    block     number, rows                     followed by the descriptor of a new block
    train     version, number, [sent jobs]     from the version in shared memory, whose number shows a new one, into
                                               this block, in which the clients' states are already
    measure   version, [jobs]                  evaluate this version; the jobs have the clients' states themselves
    quit

Its answers: ready; done, [results or sums]; failed, traceback. No arrays of a training are sent: a result has the names
of its arrays. Only a client's state that does not fit the form, such as a Flower app's, is sent itself.
"""

import multiprocessing.process
import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from atoll.ground.process.forking import reopen_files
from atoll.ground.process.heap import keep_freed_blocks
from atoll.parallel.engine.orphans import end_with_the_parent
from atoll.protocol.signals import ENDING
from atoll.simulations.engines.batched.batched import trainer_of
from atoll.simulations.engines.batched.together import together_if_possible
from atoll.simulations.engines.engine import Failed, Job, Trained, Training
from atoll.simulations.engines.measuring import Measurer, measurer_of
from atoll.simulations.engines.one_process import Trainer, threads_of_torch
from atoll.simulations.engines.rows import Form, Rows
from atoll.simulations.engines.sequential import sequential_trainer
from atoll.simulations.engines.shared_memory import mapped
from atoll.task.arrays import Arrays
from atoll.task.metrics import Statistics


@dataclass(frozen=True, slots=True)
class Plan:
    """Trainer of a worker, as sent to the worker."""

    training: Training

    threads: int = 1
    """Threads of each operation."""

    at_once: int | None = None
    """Clients in a group; None: one after another."""

    kind: str | None = None
    """Kind of the net that computes a group."""

    def measurer(self) -> Measurer:
        """Build the measurer, in the worker."""
        return measurer_of(self.training) if self.at_once is None else together_if_possible(self.training)

    def trainer(self) -> Trainer:
        """Build the trainer, in the worker."""
        torch.set_num_threads(self.threads)
        if self.at_once is None:
            return sequential_trainer(self.training)
        return trainer_of(self.training, at_once=self.at_once, kind=self.kind)


def plan_of(training: Training, batched: bool, at_once: int | None, *, threads: int) -> tuple[Plan, Trainer]:
    """Return the plan of each worker, and a trainer in this process, for its form and its windows.

    Raises:
        CannotBatch: the task cannot be batched; the message has the reason.
    """
    if not batched:
        return Plan(training, threads), sequential_trainer(training)
    with threads_of_torch(threads):
        trainer = trainer_of(training, at_once=at_once)
    return Plan(training, threads, trainer.at_once, trainer.kind), trainer


class Sent(NamedTuple):
    """Job as sent to a worker, with the names of the client's arrays; a tuple, because there are many."""

    client_id: str
    seed: int
    steps: int | None
    round_id: int
    version: int
    own: tuple[str, ...] | Arrays | None
    asked_at: float

    @classmethod
    def of(cls, job: Job, rows: Rows, index: int) -> "Sent":
        """Return the message of a job, and copy the client's arrays into its row, if it has room for them."""
        own = None if job.own is None else _sent(job.own, rows)
        if isinstance(own, tuple):
            rows.write(index, {}, job.own)
        return cls(job.client_id, job.seed, job.steps, job.round_id, job.version, own, job.asked_at)

    def job(self, rows: Rows, index: int) -> Job:
        """Return the job with a copy of the client's arrays, because its results will overwrite them."""
        own = self.own
        if isinstance(own, tuple):
            views = rows.own_of(index)
            own = {name: views[name].copy() for name in own}
        return Job(self.client_id, self.seed, self.steps, own, self.round_id, self.version, self.asked_at)


class Written(NamedTuple):
    """Result as sent back, with the names of its arrays, which are in a row."""

    client_id: str
    num_examples: int | float
    work: float
    statistics: Statistics
    report: dict[str, Any]
    update: tuple[str, ...]
    own: tuple[str, ...] | Arrays
    has_row: bool
    has_magnitudes: bool

    @classmethod
    def of(cls, result: Trained, rows: Rows, index: int) -> "Written":
        """Return the message of a result, and copy arrays that are not in its row there."""
        own = _sent(result.own, rows)
        if result.row is None:
            rows.write(index, result.update, result.own if isinstance(own, tuple) else {})
        return cls(
            result.client_id,
            result.num_examples,
            result.work,
            result.statistics,
            result.report,
            tuple(result.update),
            own,
            has_row=result.row is not None,
            has_magnitudes=result.magnitudes is not None,
        )

    def read(self, rows: Rows, index: int) -> Trained:
        """Return the result with its arrays."""
        return Trained(
            self.client_id,
            _only(self.update, rows.update_of(index)),
            self.num_examples,
            self.work,
            self.statistics,
            _only(self.own, rows.own_of(index)) if isinstance(self.own, tuple) else self.own,
            self.report,
            rows.update[index] if self.has_row else None,
            rows.largest[index] if self.has_magnitudes else None,
        )


def _sent(own: Arrays, rows: Rows) -> tuple[str, ...] | Arrays:
    """Return the names of a client's arrays, if rows have room for them; otherwise the arrays."""
    return tuple(own) if rows.has_places_for(own) else own


def _only(names: Sequence[str], arrays: Arrays) -> Arrays:
    return arrays if len(names) == len(arrays) else {name: arrays[name] for name in names}


def work(connection: Connection, plan: Plan, form: Form, version: int) -> None:
    """Run a worker process.

    Args:
        connection: the connection to the engine.
        plan: the plan of its trainer.
        form: the form of the results.
        version: the descriptor of the version's memory; -1: it arrives through the connection.
    """
    for number in ENDING:  # a terminal or a supervisor sends them to the whole group
        signal.signal(number, signal.SIG_IGN)  # the parent handles them, and ends this process
    end_with_the_parent()
    reopen_files()
    keep_freed_blocks()
    may_have_children()
    descriptor = version if version >= 0 else reduction.recv_handle(connection)
    try:
        _serve(connection, plan, form, descriptor)
    except EOFError:
        return
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        raise SystemExit(1) from None


def may_have_children() -> None:
    """Allow this process to have child processes: the DataLoader of a task's loop.

    multiprocessing forbids children to a daemon, which it kills when the parent exits; here `end_with_the_parent` and
    the watchdog of a DataLoader's workers already do this.
    """
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def _serve(connection: Connection, plan: Plan, form: Form, descriptor: int) -> None:
    the_version = Form((), form.update)  # as separate tensors, whose integers keep their dtype
    shared = Rows(the_version, 1, mapped(descriptor, Rows.num_bytes(the_version, 1)))
    trainer, blocks = plan.trainer(), dict[int, Rows]()
    measured = _Measured(plan, shared)
    begun_with = 0
    connection.send(("ready",))
    while True:
        message = connection.recv()
        if message[0] == "quit":
            return
        if message[0] == "block":
            blocks[message[1]] = _block(connection, form, message[2])
            continue
        try:
            if message[0] == "measure":
                connection.send(("done", measured(*message[1:])))
                continue
            _, version, block, sent = message
            if version != begun_with:
                trainer.begin(shared.own_of(0), sent[0].version if sent else 0)
                begun_with = version
            connection.send(("done", _train(trainer, blocks[block], sent)))
        except Exception as error:  # the message of ClientFailed already has the traceback
            text = str(error) if type(error).__name__ == "ClientFailed" else traceback.format_exc()
            connection.send(("failed", text))


class _Measured:
    """Evaluations of a worker, whose measurer is made for the first one.

    Args:
        plan: the plan of the worker.
        shared: the version in shared memory.
    """

    def __init__(self, plan: Plan, shared: Rows) -> None:
        self._plan, self._shared, self._begun_with = plan, shared, 0
        self._measurer: Measurer | None = None

    def __call__(self, version: int, jobs: Sequence[Job]) -> list[Statistics | str]:
        """Evaluate the version of a number on the clients of the jobs."""
        self._measurer = measurer = self._measurer or self._plan.measurer()
        if version != self._begun_with:
            measurer.begin(self._shared.own_of(0), jobs[0].version)
            self._begun_with = version
        return measurer.measure(jobs)


def _train(trainer: Trainer, rows: Rows, sent: Sequence[Sent]) -> list[Written | Failed]:
    jobs = [each.job(rows, index) for index, each in enumerate(sent)]
    results = enumerate(trainer.train(jobs, rows))
    return [result if isinstance(result, Failed) else Written.of(result, rows, index) for index, result in results]


def _block(connection: Connection, form: Form, count: int) -> Rows:
    descriptor = reduction.recv_handle(connection)
    try:
        return Rows(form, count, mapped(descriptor, Rows.num_bytes(form, count)))
    finally:
        os.close(descriptor)

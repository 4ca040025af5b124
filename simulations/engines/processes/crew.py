"""A worker process of an engine: it trains windows of clients into shared memory and says what lies where.

Messages to it, each a tuple whose first word says what it is:

    block     number, rows                     then the descriptor of a new block
    train     version, number, [jobs as sent]  from the version that lies in memory, counted so that a new one is seen,
                                               into this block, where the clients' own arrays lie already
    quit

Its answers: ready; done, [results]; failed, traceback. No array is ever sent: results have the names of theirs.
"""

import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from atoll.parallel.task.arrays import Arrays
from atoll.parallel.task.metrics import Statistics
from atoll.simulations.engines.batched.batched import BatchTrainer
from atoll.simulations.engines.engine import Failed, Job, Trained, Training
from atoll.simulations.engines.one_process import Trainer, threads_of_torch
from atoll.simulations.engines.processes.orphans import end_with_the_parent
from atoll.simulations.engines.rows import Form, Rows
from atoll.simulations.engines.sequential import sequential_trainer
from atoll.simulations.engines.shared import mapped


@dataclass(frozen=True, slots=True)
class Plan:
    """How a worker trains."""

    training: Training

    threads: int = 1
    """Of each operation."""

    at_once: int | None = None
    """Clients in a product; None: one after another."""

    kind: str | None = None
    """Of the net that makes the product."""

    def trainer(self) -> Trainer:
        """Built in the worker."""
        torch.set_num_threads(self.threads)
        if self.at_once is None:
            return sequential_trainer(self.training)
        return BatchTrainer(self.training, at_once=self.at_once, kind=self.kind)


def plan_of(training: Training, batched: bool, at_once: int | None, *, threads: int) -> tuple[Plan, Trainer]:
    """What each worker does, and a trainer of our own, which is asked for its form and its windows alone.

    Raises:
        CannotBatch: with the reason.
    """
    if not batched:
        return Plan(training, threads), sequential_trainer(training)
    with threads_of_torch(threads):
        trainer = BatchTrainer(training, at_once=at_once)
    return Plan(training, threads, trainer.at_once, trainer.kind), trainer


class Sent(NamedTuple):
    """A job on its way to a worker: of its own arrays only the names. A tuple, for so many are sent."""

    client_id: str
    seed: int
    steps: int | None
    round_id: int
    own: tuple[str, ...] | None

    @classmethod
    def of(cls, job: Job) -> "Sent":
        """Its own arrays lie elsewhere."""
        return cls(job.client_id, job.seed, job.steps, job.round_id, None if job.own is None else tuple(job.own))

    def job(self, rows: Rows, index: int) -> Job:
        """The job with a copy of the client's own arrays, which lie where its results will."""
        own = None
        if self.own is not None:
            views = rows.own_of(index)
            own = {name: views[name].copy() for name in self.own}
        return Job(self.client_id, self.seed, self.steps, own, self.round_id)


class Written(NamedTuple):
    """A result on its way back, whose arrays lie in a row: their names are what is left of them."""

    client_id: str
    num_examples: int
    work: float
    statistics: Statistics
    report: dict[str, Any]
    update: tuple[str, ...]
    own: tuple[str, ...]
    has_row: bool
    has_magnitudes: bool

    @classmethod
    def of(cls, result: Trained, rows: Rows, index: int) -> "Written":
        """Put what does not lie in its row there."""
        if result.row is None:
            rows.write(index, result.update, result.own)
        told = result.client_id, result.num_examples, result.work, result.statistics, result.report
        has = result.row is not None, result.magnitudes is not None
        return cls(*told, tuple(result.update), tuple(result.own), *has)

    def read(self, rows: Rows, index: int) -> Trained:
        """The result with its arrays."""
        update, own = _only(self.update, rows.update_of(index)), _only(self.own, rows.own_of(index))
        row = rows.update[index] if self.has_row else None
        magnitudes = rows.largest[index] if self.has_magnitudes else None
        told = self.client_id, update, self.num_examples, self.work, self.statistics, own, self.report
        return Trained(*told, row, magnitudes)


def _only(names: Sequence[str], arrays: Arrays) -> Arrays:
    return arrays if len(names) == len(arrays) else {name: arrays[name] for name in names}


def work(connection: Connection, plan: Plan, form: Form, version: int) -> None:
    """The life of a worker.

    Args:
        connection: to the engine.
        plan: how it trains.
        form: of the results.
        version: descriptor of the version's memory; -1: it comes through the connection.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # which a terminal or a supervisor sends to all of the group
        signal.signal(number, signal.SIG_IGN)  # they are for whoever started us, and who ends us
    end_with_the_parent()
    descriptor = version if version >= 0 else reduction.recv_handle(connection)
    try:
        _serve(connection, plan, form, descriptor)
    except EOFError:
        return
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        raise SystemExit(1) from None


def _serve(connection: Connection, plan: Plan, form: Form, descriptor: int) -> None:
    the_version = Form(form.update, ())
    shared = Rows(the_version, 1, mapped(descriptor, Rows.num_bytes(the_version, 1)))
    trainer, blocks = plan.trainer(), dict[int, Rows]()
    begun_with = 0
    connection.send(("ready",))
    while True:
        message = connection.recv()
        if message[0] == "quit":
            return
        if message[0] == "block":
            blocks[message[1]] = _block(connection, form, message[2])
            continue
        _, version, block, sent = message
        try:
            if version != begun_with:
                trainer.begin(shared.update_of(0))
                begun_with = version
            connection.send(("done", _train(trainer, blocks[block], sent)))
        except Exception as error:  # ClientFailed has the traceback in its message already
            told = str(error) if type(error).__name__ == "ClientFailed" else traceback.format_exc()
            connection.send(("failed", told))


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

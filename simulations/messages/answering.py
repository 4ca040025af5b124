"""The computation of answers to messages, in this process or in several, with the bits of an agent's worker."""

import os
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from atoll.ground.printable import count_of
from atoll.ground.process.forking import leaving_garbage, reopen_files
from atoll.protocol.vocabulary import ClientId
from atoll.simulations.engines.engine import Failed
from atoll.simulations.engines.one_process import threads_of_torch
from atoll.simulations.engines.processes.processes import WorkerDied
from atoll.task.array_task import ArrayTask
from atoll.task.arrays import Arrays
from atoll.task.content import from_tensors, to_tensors
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, Tensor, in_order
from atoll.training.worker.bench import Bench, MessageBench
from atoll.training.worker.benches import bench_of
from atoll.training.worker.operations import detail_of, kind_of

BENCHES_MAX = 64
"""Maximum number of clients whose apps stay loaded."""

WHOLE = 2**62
"""Size of a piece [bytes] that no tensor exceeds: each tensor of a reply is one piece."""


@dataclass(frozen=True, slots=True)
class Question:
    """Message to a client, ready to be answered."""

    client_id: ClientId
    kind: str
    group: str
    number: int
    """The number of the message in the run."""
    seed: int
    content: Path
    own: Arrays | None
    """The client's state after its newest message whose reply counted; None: none."""
    out: Path
    """The file of the reply's bytes, one tensor after the other."""
    run_number: int = 0
    asked_at: float = 0.0
    """The instant at which the message was sent [s since the epoch]."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Reply of a client, whose bytes are in its file."""

    pieces: tuple[Piece, ...]
    own: Arrays | None
    seconds: float = 0.0
    """Real time of its computation [s]: a message that allows less time gets no reply."""


Outcome = Answer | Failed


class Benches:
    """Loaded apps of the clients.

    Args:
        task: the task, whose sites are the clients.
        given: the settings of the run for the task.
        threads: the threads of each operation of torch.
    """

    def __init__(self, task: ArrayTask, given: Mapping[str, Any], threads: int) -> None:
        self._task, self._given, self._threads = task, dict(given), threads
        self._loaded: dict[ClientId, Bench] = {}

    def answer(self, question: Question) -> Outcome:
        """Let a client answer a message; an error of its code becomes the reason why there is no reply."""
        try:
            with threads_of_torch(self._threads):
                return self._answer(question)
        except (Exception, SystemExit) as error:
            traceback.print_exc()  # the full traceback, as in a worker's log
            return Failed(question.client_id, kind_of(error, "message"), detail_of(error))

    def _answer(self, question: Question) -> Answer:
        request = {
            "site": question.client_id,
            "local": self._given,
            "kind": question.kind,
            "group": question.group,
            "round_id": question.number,
            "seed": question.seed,
            "run_number": question.run_number,
            "asked_at": question.asked_at,
        }
        bench = self._bench(question.client_id, request)
        assert isinstance(bench, MessageBench)  # the setting of a run has been checked
        content = from_tensors(safetensors_file.mapped(question.content))
        began = time.monotonic()
        answer = bench.message(content, question.own, request)
        seconds = time.monotonic() - began
        tensors = to_tensors(answer.content)
        layout = in_order(Tensor(name, "U8", array.shape) for name, array in tensors.items())
        pieces: list[Piece] = []
        with question.out.open("wb") as file:
            for tensor in layout:
                copied = {tensor.name: tensors.pop(tensor.name).copy()}  # a thread of the app may still change its copy
                pieces += safetensors_file.pieces_of((tensor,), copied, WHOLE)
                file.write(copied[tensor.name].data)
        return Answer(tuple(pieces), answer.own, seconds)

    def _bench(self, client_id: ClientId, request: dict[str, Any]) -> Bench:
        if client_id not in self._loaded:
            while len(self._loaded) >= BENCHES_MAX:
                del self._loaded[next(iter(self._loaded))]
            self._loaded[client_id] = bench_of(self._task, request)
        return self._loaded[client_id]


class Engine(Protocol):
    """Engine that computes answers."""

    name: str

    def begin(self, question: Question) -> Callable[[], Outcome]:
        """Start a message, and return the function that waits for its answer."""
        ...

    def close(self) -> None:
        """End the processes of the engine."""
        ...


class Sequential:
    """Engine of this process: an answer is computed when it is requested."""

    name = "sequential"

    def __init__(self, benches: Benches) -> None:
        self._benches = benches

    def begin(self, question: Question) -> Callable[[], Outcome]:
        """Start a message."""
        return partial(self._benches.answer, question)

    def close(self) -> None:
        """Do nothing: there is no other process."""


_benches: Benches | None = None
"""The clients' apps in a process of the pool, which inherits them."""


class Pool:
    """Engine of several processes, forked at its start, which compute each answer as soon as possible.

    Args:
        benches: the clients' apps.
        workers: the number of processes; 0: one for each available processor.

    Raises:
        WorkerDied: a process could not start.
    """

    def __init__(self, benches: Benches, workers: int) -> None:
        global _benches
        count = workers or len(os.sched_getaffinity(0))
        self.name = count_of(count, "process", "processes")
        self._executor = ProcessPoolExecutor(count, mp_context=get_context("fork"), initializer=reopen_files)
        _benches = benches
        try:
            with leaving_garbage():
                _result(self._executor.submit(os.getpid))
        finally:
            _benches = None

    def begin(self, question: Question) -> Callable[[], Outcome]:
        """Start a message, and begin computing its answer."""
        return partial(_result, self._executor.submit(_answered, question))

    def close(self) -> None:
        """End the processes."""
        self._executor.shutdown(cancel_futures=True)


def _answered(question: Question) -> Outcome:
    assert _benches is not None
    return _benches.answer(question)


def _result(future: "Future[Any]") -> Any:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise WorkerDied(f"a process that answers messages has died: {error}") from error

"""Rank processes that stay: each trains one generated model after another, in groups of one to four ranks."""

import gc
import logging
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from atoll.parallel.engine.forked import FROZEN, PRELOAD
from tests.parallel.generated.answer import Answer
from tests.parallel.generated.strategies import Case

RANKS = 4
PATIENCE_S = 120.0
"""Longest wait for a case; GRACE_S for the other ranks once one has failed or refused: a stage waits for its peers."""
GRACE_S = 3.0
LIFE = 50
"""Cases of a process: of a sharded one some twenty threads of gloo stay, and thousands of them eat the processors."""


class Pool:
    """The processes, which are started at the first case, and again after one that did not end."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-generated-")
        self._number = 0

    def train(self, case: Case) -> list[Answer]:
        """Train a case; the answer of each rank. One that waits for a rank that has ended says so."""
        if self._number % LIFE == 0:
            self.close()
        if not self._processes:
            self._start()
        self._number += 1
        folder = str(Path(self._folder.name) / str(self._number))
        for pipe in self._pipes[: case.ranks]:
            pipe.send((case, folder))
        return self._collect(case.ranks)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, "tests.parallel.generated.training", FROZEN])
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _collect(self, ranks: int) -> list[Answer]:
        answers: dict[int, Answer] = {}
        until = time.monotonic() + PATIENCE_S
        while len(answers) < ranks:
            left = [pipe for rank, pipe in enumerate(self._pipes[:ranks]) if rank not in answers]
            ready = wait(left, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except EOFError:
                    answers[rank] = Answer("failed", "the process died")
                if answers[rank].word != "done":
                    until = min(until, time.monotonic() + GRACE_S)
        if any(answer.word == "failed" for answer in answers.values()) or len(answers) < ranks:
            self.close()
        return [answers.get(rank, Answer("failed", "it did not end")) for rank in range(ranks)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def end(self) -> None:
        """End the processes, and remove their files."""
        self.close()
        self._folder.cleanup()


def _serve(rank: int, pipe: Connection) -> None:
    import torch

    from atoll.parallel.engine.orphans import end_with_the_parent
    from tests.parallel.generated.training import train_case

    end_with_the_parent()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    while True:
        case, folder = pipe.recv()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks))
        try:
            answer = train_case(case, rank, Path(folder))
        except BaseException:
            answer = Answer("failed", traceback.format_exc())
        gc.collect()  # engines are circles of references, and hold the threads of their groups
        pipe.send_bytes(pickle.dumps(answer))

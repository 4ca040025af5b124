"""Rank processes that stay for the session and are handed functions, in process groups of one to four.

A start of ranks costs a third of a second, and the first use of DDP, `fully_shard` or a pipeline in a process as much
again: tests that only compute share the ranks of their session (`call_on_ranks`). A test that kills a rank or
measures its memory starts its ranks (`run_ranks`, with the same arguments).

What a function leaves behind does not reach the next one. Random states, environment, working directory, the defaults
of torch are set back. A function that fails or does not end, or that has given another value to a name of a module (a
patch), is the last of its processes.

Between two calls the ranks are stopped (SIGSTOP): each thread that gloo has left wakes a hundred times a second.
"""

import atexit
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from atoll.parallel.engine.forked import FROZEN, PRELOAD, RankFailed
from tests.parallel.forked import run_ranks

RANKS = 4
GRACE_S = 2.0
"""Time [s] for the other ranks to end once one has failed: a collective or a stage waits for its peers."""

THREADS = 400
"""Threads of a process before it is replaced: nine to twenty of gloo stay after each mesh of `fully_shard`, and
thousands of them eat the processors."""

OURS = ("atoll.", "tests.", "benchmarks.", "examples.")
PATCHED = ("torch.distributed", "torch.nn.functional")
"""The beginnings of the modules in which a function may replace no value, and of those in which nothing callable."""


class Outcome(NamedTuple):
    """The end of a function on one rank.

    Attributes:
        is_good: whether it has returned.
        value: its result, or the traceback.
        threads: of the process, after it.
        replaced: the names that now have other values.
    """

    is_good: bool
    value: Any
    threads: int = 0
    replaced: tuple[str, ...] = ()


class Pool:
    """The processes, which are started at the first call, and again after one that spoilt them."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._folder: Path | None = None
        self._number, self._pid = 0, 0

    def call(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        *args: Any,
        timeout_s: float = 120.0,
        in_group: bool = True,
        grace_s: float = GRACE_S,
        is_last: Callable[[Any], bool] = lambda value: False,
    ) -> list[Outcome]:
        """Call a function on the first ranks, and return its outcomes by rank.

        Args:
            function: importable by name.
            num_ranks: the number of ranks, at most `RANKS`.
            args: the same for every rank; they and the results are pickled.
            timeout_s: for all of it.
            in_group: whether the ranks are a gloo process group; else the function makes what it needs.
            grace_s: the time for the other ranks after the first that failed.
            is_last: whether a result means that other ranks may wait for this one in vain.
        """
        assert 1 <= num_ranks <= RANKS
        if not all(process.is_alive() for process in self._processes):
            self.close()  # another test has ended one
        if not self._processes:
            self._start()
        self._number += 1
        assert self._folder is not None
        store = str(self._folder / str(self._number)) if in_group else ""
        order = pickle.dumps((num_ranks, store, function, args))
        self._send(signal.SIGCONT)
        for pipe in self._pipes[:num_ranks]:
            pipe.send_bytes(order)
        outcomes = self._collect(num_ranks, timeout_s, grace_s, is_last)
        self._send(signal.SIGSTOP)
        if any(not each.is_good or each.threads > THREADS or each.replaced for each in outcomes):
            self.close()
        return outcomes

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def _start(self) -> None:
        if self._folder is None:
            # No TemporaryDirectory: a fork of this process would remove it at its end, and ranks would wait for it.
            self._folder, self._pid = Path(tempfile.mkdtemp(prefix="atoll-test-ranks-")), os.getpid()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, FROZEN])
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self._faults(rank)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _collect(
        self, num_ranks: int, timeout_s: float, grace_s: float, is_last: Callable[[Any], bool]
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        until = time.monotonic() + timeout_s
        while len(outcomes) < num_ranks:
            left = [pipe for rank, pipe in enumerate(self._pipes[:num_ranks]) if rank not in outcomes]
            ready = wait(left, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                outcomes[rank] = self._received(rank)
                if not outcomes[rank].is_good or is_last(outcomes[rank].value):
                    until = min(until, time.monotonic() + grace_s)
        return [outcomes.get(rank, Outcome(False, "it did not end")) for rank in range(num_ranks)]

    def _received(self, rank: int) -> Outcome:
        try:
            return Outcome(*pickle.loads(self._pipes[rank].recv_bytes()))
        except EOFError:
            self._processes[rank].join()
            said = self._faults(rank).read_text()
            return Outcome(False, f"died with exit code {self._processes[rank].exitcode}\n{said}")

    def _faults(self, rank: int) -> Path:
        """Return the file of a rank's stacks, which `faulthandler` writes where a signal of a fault ends it."""
        assert self._folder is not None
        return self._folder / f"faults-{rank}"

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def end(self) -> None:
        """End the processes, and remove their files; do nothing in a fork of the process that has the pool."""
        if self._folder is not None and os.getpid() == self._pid:
            self.close()
            shutil.rmtree(self._folder)
            self._folder = None


SHARED = Pool()
"""The pool of this process: of each that runs tests."""

atexit.register(SHARED.end)  # before `multiprocessing` asks its children to end, which stopped ones do not hear


def call_on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call `function(*args)` on ranks that stay, in a gloo process group; return the results by rank.

    More than `RANKS` ranks are started for the call. Args: as of `forked.run_ranks`.

    Raises:
        RankFailed: with the traceback of the ranks that failed.
    """
    if num_ranks > RANKS:
        return run_ranks(function, num_ranks, *args, timeout_s=timeout_s)
    outcomes = SHARED.call(function, num_ranks, *args, timeout_s=timeout_s)
    if failures := [f"rank {rank}: {each.value}" for rank, each in enumerate(outcomes) if not each.is_good]:
        raise RankFailed("\n".join(failures))
    return [each.value for each in outcomes]


def _serve(rank: int, pipe: Connection, faults: Path) -> None:
    """Call one function after another."""
    faulthandler.enable(faults.open("w"))
    import torch

    from atoll.parallel.engine.orphans import end_with_the_parent

    end_with_the_parent()
    torch.set_num_threads(1)
    first = _Surroundings()
    while True:
        with suppress(EOFError):
            order = pickle.loads(pipe.recv_bytes())
            before = _values()
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(order[0]))
            is_good, value = _called(rank, *order)
            gc.collect()  # engines are circles of references, and hold the threads of their groups
            _release_groups()
            first.restore()
            threads = len(os.listdir("/proc/self/task"))
            answer = (is_good, value, threads, _replaced(before))
            pipe.send_bytes(pickle.dumps(answer))
            continue
        os._exit(0)


def _called(
    rank: int, num_ranks: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[bool, Any]:
    import torch.distributed as dist

    from atoll.parallel.world import World, process_group

    try:
        if not store:
            return True, function(*args)
        found = dist.FileStore(store, num_ranks)  # type: ignore[attr-defined]
        with process_group(World(rank, rank, num_ranks), store=found):
            result = function(*args)
            dist.barrier()  # no rank destroys the group while another still needs it
        return True, result
    except BaseException:  # any error is reported to the caller
        return False, traceback.format_exc()


def _release_groups() -> None:
    """Let the meshes that torch's caches keep forget their groups, of which each has three threads of gloo."""
    from torch.distributed.device_mesh import DeviceMesh

    for each in gc.get_objects():
        if type(each) is DeviceMesh:  # an object may pretend to be of any class
            getattr(each, "_pg_registry", {}).clear()


class _Surroundings:
    """What a process has for all functions that it calls, as it is now."""

    def __init__(self) -> None:
        import numpy as np
        import torch

        self._torch, self._numpy, self._random = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self._environment, self._folder, self._path = dict(os.environ), os.getcwd(), [*sys.path]
        self._filters, self._disabled = [*warnings.filters], logging.root.manager.disable

    def restore(self) -> None:
        """Set all of it back."""
        import numpy as np
        import torch

        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._random)
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.path[:] = self._path
        warnings.filters[:] = self._filters  # type: ignore[index]
        logging.disable(self._disabled)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)


def _values() -> dict[str, dict[str, Any]]:
    """Return the values of all names of the watched modules."""
    return {
        module: {name: value for name, value in vars(sys.modules[module]).items() if callable(value) or is_ours}
        for module in [*sys.modules]
        if (is_ours := module.startswith(OURS)) or module.startswith(PATCHED)
    }


def _replaced(before: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """Return the names that have other values than before."""
    return tuple(
        f"{module}.{name}"
        for module, names in before.items()
        for name, value in names.items()
        if module in sys.modules and vars(sys.modules[module]).get(name, value) is not value
    )

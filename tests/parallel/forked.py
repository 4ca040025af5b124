"""Several ranks on this machine, from a fork server that has loaded torch once: 8 ranks in 1.4 s instead of 31 s."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from atoll.parallel.engine.forked import FROZEN, PRELOAD, RankFailed
from atoll.parallel.engine.orphans import end_with_the_parent

GRACE_S = 2.0
"""Time [s] to wait for further failures after the first: the rank that reports first may only suffer from another's."""


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call `function(*args)` on every rank of a gloo process group, and return the results by rank.

    Args:
        function: importable by name; it finds its rank through `torch.distributed`.
        num_ranks: the number of processes, each with one thread.
        args: the same for every rank; they and the results are pickled (nothing here comes from a network).
        timeout_s: the timeout of all ranks together [s].

    Raises:
        RankFailed: a rank failed; the message has the traceback of the first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, FROZEN])
    with tempfile.TemporaryDirectory(prefix="atoll-ranks-") as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(target=_rank, args=(rank, num_ranks, store, sender, function, args), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            return _collect(processes, [receiver for receiver, _ in pipes], timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(processes: list[ForkServerProcess], receivers: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    until = time.monotonic() + timeout_s
    while len(results) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, until - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            rank = receivers.index(receiver)  # type: ignore[arg-type]
            has_ended_well, results[rank] = _received(receivers[rank], processes[rank])
            if not has_ended_well:
                failures.append(f"rank {rank}: {results[rank]}")
                until = min(until, time.monotonic() + GRACE_S)
    if failures:
        raise RankFailed("\n".join(failures))
    if missing := sorted(set(range(len(receivers))) - results.keys()):
        raise RankFailed(f"ranks {missing} did not end within {timeout_s} s")
    return [results[rank] for rank in range(len(receivers))]


def _received(receiver: Connection, process: ForkServerProcess) -> tuple[bool, Any]:
    try:
        has_ended_well, result = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        return False, f"died with exit code {process.exitcode}"
    return bool(has_ended_well), result


def _rank(
    rank: int, num_ranks: int, store: str, sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    from atoll.parallel.world import World, process_group

    end_with_the_parent()  # a signal may have ended it while it started this process
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    try:
        with process_group(World(rank, rank, num_ranks), store=_file_store(store, num_ranks)):
            result = function(*args)
            dist.barrier()  # no rank destroys the group while another still needs it
        answer = pickle.dumps((True, result))  # not `send`: torch would share the memory of a process that ends
    except BaseException:  # any error is reported to the caller
        answer = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(answer)


def _file_store(path: str, num_ranks: int) -> Any:
    import torch.distributed as dist

    return dist.FileStore(path, num_ranks)  # type: ignore[attr-defined]

"""The folder of a training, in which one training at a time may write."""

import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from atoll.ground.file_lock import OWNER_BYTES_MAX, Locked, lock_file
from atoll.operations.faults import CommandError, RunFailed, temporary_cause
from atoll.operations.temporary import START_BYTES, TryAgain, disk_fault
from atoll.parallel.trainer.loop import BEST, MODEL
from atoll.parallel.trainer.results_folder import TRAINING, faults_of_place
from atoll.parallel.trainer.run import LOG, RESULT
from atoll.parallel.world import TIMEOUT_S, World, process_group

LOCK = "lock"
"""The file in the folder of a training that its process locks; it stays when the process ends."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock on the folder of a training, which is made when it is missing.

    Raises:
        CommandError: another process trains in the folder, the folder cannot be made, or it has files of another kind.
    """
    try:
        _check_place(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_file(folder / LOCK, f"process {os.getpid()} on {platform.node()}"[:OWNER_BYTES_MAX])
        _check_room(folder)
    except Locked as error:
        raise CommandError(
            f"--out: {folder} is in use by another training ({error.owner or 'of an unknown process'}): wait for its "
            "end, or choose another folder with --out"
        ) from error
    except OSError as error:
        if temporary_cause(error) is not None:
            raise TryAgain(f"--out: {disk_fault(error, folder, START_BYTES)}") from error
        reason = "it is no folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise CommandError(f"--out: {folder} cannot be used: {reason}; choose another folder") from error
    try:
        yield
    finally:
        os.close(lock)


def _check_place(folder: Path) -> None:
    """Check that a training overwrites nothing in its folder that is not a training's.

    Raises:
        CommandError: the folder has other files; the error lists them.
    """
    lost = [] if (folder / LOG).exists() else [name for name in (MODEL, BEST, RESULT) if (folder / name).exists()]
    if faults := faults_of_place(folder, TRAINING, lost):
        raise CommandError(*(f"--out: {fault}" for fault in faults))


def _check_room(folder: Path) -> None:
    """Check the disk's free space at the start, before TensorBoard's thread meets a full disk and prints a traceback.

    Raises:
        OSError: there is no room.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, START_BYTES)


class RefusedForAll(CommandError):
    """The refusal of the folder on the other ranks: the first one says why."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = ()


@contextmanager
def folder_of_all_ranks(folder: Path, world: World, device: str) -> Iterator[None]:
    """Hold the lock on the folder of a training whose ranks another launcher has started, on one machine or several.

    The ranks meet first. So none waits for a first rank that was refused, and none begins beside another training.

    Args:
        folder: on storage that all ranks share; the first rank takes the lock.
        world: this rank.
        device: the kind of device, cpu or cuda.

    Raises:
        CommandError: another process trains in the folder, or the folder cannot be made, or the launcher has set no
            address where the ranks meet; on all ranks, with its reason on the first.
        RunFailed: not all ranks have come.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(process_group(world, device))
        except ValueError as error:
            raise CommandError(str(error)) from error
        except dist.DistError as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            first = str(error).partition("\n")[0]
            raise RunFailed(
                f"rank {world.rank} of {world.size} has not met the others at {place} within {TIMEOUT_S:g} s: "
                f"start all of them, with one MASTER_ADDR and MASTER_PORT ({first})"
            ) from error
        fault = _taken(stack, folder) if world.is_first else None
        is_refused = torch.tensor([fault is not None], dtype=torch.uint8)
        dist.broadcast(is_refused, 0)
        if is_refused.item():
            with suppress(RuntimeError):  # a rank that has ended already knows
                dist.barrier()
            raise fault or RefusedForAll()
        yield


def _taken(stack: ExitStack, folder: Path) -> CommandError | None:
    """Take the lock until the stack is closed; return the reason why this rank does not get it, or None."""
    try:
        stack.enter_context(folder_lock(folder))
    except CommandError as error:
        return error
    return None

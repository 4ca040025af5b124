"""The folder of a training, in which one training at a time may write."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.cli.faults import CommandError
from atoll.protocol.file_lock import Locked, lock_file

LOCK = "lock"
"""The file in the folder of a training that its process locks; it stays when the process ends."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock on the folder of a training, which is made when it is missing.

    Raises:
        CommandError: another process trains in the folder, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_file(folder / LOCK, f"process {os.getpid()}")
    except Locked as error:
        raise CommandError(
            f"--out: {folder} is in use by another training ({error.owner or 'of an unknown process'}): wait for its "
            "end, or choose another folder with --out"
        ) from error
    except OSError as error:
        raise CommandError(f"--out: {folder} cannot be used: {error}; choose another folder") from error
    try:
        yield
    finally:
        os.close(lock)

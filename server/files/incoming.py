"""An upload in progress: a file that grows, or a few bytes in memory."""

import ctypes
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.ground.durable import naming_full_disk
from atoll.ground.printable import count_of
from atoll.protocol.wire.bulk_messages import Buffer
from atoll.protocol.wire.channel import INLINE_BYTES_MAX
from atoll.tensors.layout import Piece
from atoll.tensors.updates.inspection import Inspection, Inspector

SMALL_BYTES = INLINE_BYTES_MAX
"""Size up to which an update has no file: creating and syncing a file costs more than writing its bytes."""

WRITEBACK_BYTES = 8 << 20
"""Number of bytes after which the kernel is told to start writing to the disk, while more bytes arrive."""


class Incoming:
    """Upload that is being written, by one thread; `position` is the number of received bytes.

    A small upload is discarded when its context ends: sending it again costs less than asking where to resume.
    """

    def __init__(
        self,
        path: Path,
        total_bytes: int,
        on_close: Callable[["Incoming"], None],
        *,
        has_file: bool = False,
        has_values: bool = True,
    ) -> None:
        self.path, self.total_bytes, self._has_values = path, total_bytes, has_values
        self._on_close, self._has_file = on_close, has_file
        self._data, self._file, self.position = bytearray(), -1, 0
        self._written_back = 0  # bytes that the kernel was told to write to the disk
        if not self.is_small:
            self._open()

    @property
    def is_small(self) -> bool:
        """Return whether the bytes are only in memory."""
        return not self._has_file and self.total_bytes <= SMALL_BYTES

    @property
    def data(self) -> bytes | None:
        """The bytes of a small upload so far; None for one with a file."""
        return bytes(self._data) if self.is_small else None

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self.position = os.fstat(self._file).st_size
        if self.position > self.total_bytes:
            os.ftruncate(self._file, self.total_bytes)
            self.position = self.total_bytes
        self._written_back = self.position

    def append(self, data: Buffer) -> None:
        """Append the next bytes.

        Raises:
            ValueError: the bytes go beyond the announced size.
            DiskFull: the disk is full; `position` has advanced by the part that was written.
        """
        if self.position + len(data) > self.total_bytes:
            raise ValueError(
                f"{count_of(len(data), 'byte')} at {self.position} would go beyond the announced {self.total_bytes}"
            )
        if self.is_small:
            self._data += data
            self.position += len(data)
        else:
            self._write(data)

    def _write(self, data: Buffer) -> None:
        view = memoryview(data)
        with naming_full_disk(self.path):
            while view:  # by position: two uploads of one digest write the same bytes to the same offsets
                count = os.pwrite(self._file, view, self.position)
                self.position += count
                view = view[count:]
        if self.position - self._written_back >= WRITEBACK_BYTES:
            begin_writeback(self._file, self._written_back, self.position - self._written_back)
            self._written_back = self.position

    def inspector(self, pieces: Iterable[Piece]) -> Inspector:
        """Return an inspector that checks the bytes of the upload while more of them arrive."""
        return Inspector(self.path, pieces, data=self.data, has_values=self._has_values)

    def inspect(self, pieces: Iterable[Piece]) -> Inspection:
        """Inspect every byte of a complete upload.

        Raises:
            TensorFileCorrupted: the upload is not complete (an OSError).
        """
        return self.inspector(pieces).finish()

    def sync(self) -> None:
        """Sync the written bytes of a file to the disk."""
        if self._file >= 0:
            with naming_full_disk(self.path):
                os.fdatasync(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_close(self)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


SYNC_FILE_RANGE_WRITE = 2
"""A flag of Linux's fcntl.h."""


def begin_writeback(fd: int, start: int, num_bytes: int) -> None:
    """Ask the kernel to start writing these bytes of a file to the disk.

    A hint without a guarantee: if the call does not exist or fails, fdatasync writes everything.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, start, num_bytes, SYNC_FILE_RANGE_WRITE)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

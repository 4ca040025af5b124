"""A file of records that only grows, locked by its exporter; a record that a killed process has cut off is removed."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from atoll.exports.destination import ExportRefused, Steps
from atoll.exports.rows import Row
from atoll.ground.file_lock import Locked, lock_file

Read = Callable[[bytes], tuple[list[bytes], list[int]]]
"""Function from a file's bytes to its whole records, and the end of each in the file."""

Frame = Callable[[bytes, int], bytes]
"""Function from a record and its place in the file to its bytes there."""


class RecordFile:
    """An open file of records that only grows, locked by its exporter.

    Args:
        path: the path of the file, which is made when it is missing.
        read: reads the records.
        frame: returns the bytes of a record.
        header: the first bytes of the file.

    Raises:
        ExportRefused: another process writes the file.
    """

    def __init__(self, path: Path, read: Read, frame: Frame, header: bytes = b"") -> None:
        self.path, self._frame = path, frame
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = os.fdopen(lock_file(path, mode=0o644), "r+b")
        except Locked as error:
            raise ExportRefused(
                f"{path}: another export writes it: wait for its end, or choose another place with --to"
            ) from error
        content = self._file.read()
        self.records, ends = read(content)
        self._ends = [len(header), *ends]
        if not content.startswith(header):
            self.records, self._ends = [], [0]
        self._file.truncate(self._ends[-1])
        self._file.seek(0, os.SEEK_END)
        if header and not self._file.tell():
            self._file.write(header)

    def remove_last(self) -> None:
        """Remove the last of the records that were read."""
        self.records.pop()
        self._ends.pop()
        self._file.truncate(self._ends[-1])
        self._file.seek(0, os.SEEK_END)

    def forget(self) -> None:
        """Release the memory of the records that were read."""
        self.records, self._ends = [], []

    def append(self, records: Iterable[bytes]) -> None:
        """Append records; on return they are durable."""
        for record in records:
            self._file.write(self._frame(record, self._file.tell()))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, which releases it."""
        self._file.close()


class InRecords:
    """The part of a destination that is one file of records: its folder, the steps that it has, its open file.

    Args:
        folder: the folder of the files of all runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._steps, self.place = folder, Steps(), str(folder)
        self._opened: RecordFile | None = None

    @property
    def _file(self) -> RecordFile:
        assert self._opened is not None
        return self._opened

    def check(self) -> None:
        """Check that the folder can be made."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def lacks(self, row: Row) -> bool:
        """Return whether the row is missing."""
        return self._steps.lack(row)

    def close(self) -> None:
        """Close the file."""
        if self._opened is not None:
            self._opened.close()

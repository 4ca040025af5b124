"""The SHA-256 of files: of a range, a whole file, a file while it is written, and the list of a folder's digests.

The list has the form of `sha256sum`, so that `sha256sum -c SHA256SUMS` checks a folder without Atoll.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from atoll.ground.printable import count_of

BLOCK_BYTES = 1 << 20

SUMS = "SHA256SUMS"
"""The name of a folder's list of digests, which has every other relevant file of the folder."""

_LINE = re.compile(r"([0-9a-f]{64})  ([^/\x00-\x1f\x7f\\]+)")


def sha256_of_next(file: BinaryIO, num_bytes: int) -> str:
    """Return the SHA-256, in hexadecimal, of the next bytes of a file, and move its position behind them.

    Raises:
        EOFError: the file ends earlier.
    """
    digest, left = hashlib.sha256(), num_bytes
    while left:
        block = file.read(min(BLOCK_BYTES, left))
        if not block:
            raise EOFError(f"the file ends {count_of(left, 'byte')} too early")
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256, in hexadecimal, of a whole file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HashedFile:
    """A file that is written from its beginning to its end, with the SHA-256 of what was written.

    Args:
        file: open for writing, and empty.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha256 = file, hashlib.sha256()
        self.flush, self.fileno, self.tell, self.close = file.flush, file.fileno, file.tell, file.close

    def write(self, data: bytes | memoryview) -> int:
        """Write the next bytes, and return their number."""
        self._sha256.update(data)
        return self._file.write(data)

    def hexdigest(self) -> str:
        """Return the SHA-256 of the bytes so far, in hexadecimal."""
        return self._sha256.hexdigest()


class Digests:
    """The SHA-256 of files in a folder that do not change once they are written: each file is read once.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, str] = {}

    def of(self, names: Iterable[str], written: Collection[str] = ()) -> dict[str, str]:
        """Return the digest of each file by its name, relative to the folder; forget all others.

        Args:
            names: the names of the files.
            written: the names of files that were written again since the last call.

        Raises:
            OSError: one cannot be read.
        """
        known = {name: digest for name, digest in self._known.items() if name not in written}
        self._known = {name: known.get(name) or sha256_of_file(self._folder / name) for name in names}
        return self._known


def faults_of_files(folder: Path, digests: Mapping[str, str]) -> Iterator[str]:
    """Yield the faults of files whose digests are known, by their names relative to a folder."""
    for name, digest in digests.items():
        try:
            if sha256_of_file(folder / name) != digest:
                yield f"{folder / name} is damaged: its SHA-256 has changed since it was written"
        except OSError as error:
            yield f"{folder / name} cannot be read: {error.strerror}"


def sums_text(digests: Mapping[str, str]) -> str:
    """Return the list of digests, one a line, sorted by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def read_sums(folder: Path) -> dict[str, str]:
    """Return the digest of each file that a folder's list names.

    Raises:
        OSError: there is no list.
        ValueError: a line of the list is malformed.
    """
    lines = (folder / SUMS).read_bytes().decode("utf-8").split("\n")
    found = [_LINE.fullmatch(line) for line in lines[:-1]]
    for number, match in enumerate(found, 1):
        if match is None:
            raise ValueError(f"line {number} is not a SHA-256 with a name")
    if lines[-1]:
        raise ValueError(f"it ends within line {len(lines)}")
    return {match[2]: match[1] for match in found if match is not None}

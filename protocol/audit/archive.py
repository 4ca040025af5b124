"""The archive of a log: a folder of its older files, unchanged, with the public key that verifies them.

The last archived line is a checkpoint. The log continues with an event that contains the hash of that line, and with a
checkpoint over it: without the key, deleted lines cannot be passed off as archived.
"""

import filecmp
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.ground.durable import naming_full_disk
from atoll.ground.folders import sync_folder
from atoll.protocol.audit.chain import Verifier


class ArchiveRefused(OSError):
    """Error: a folder cannot take an archive; the text says why."""


@dataclass(frozen=True, slots=True)
class Archived:
    """Result of archiving: the lines that were moved to the archive."""

    first: int
    last: int
    files: tuple[Path, ...]
    """Files of the lines in the archive; empty: nothing was written since the last archive, and nothing is moved."""
    num_bytes: int
    found: Verifier
    """Verifier that has read the files, with their faults; without files, the log unchanged."""


def copy_into(out: Path, files: Sequence[Path], key: Path) -> list[Path]:
    """Copy files of a log, with its public key, into an archive, durably.

    An existing copy is kept, unless a crash left it incomplete, before more was written to its file; then it is
    replaced.

    Raises:
        ArchiveRefused: the folder belongs to another log, or has other files of these names.
        OSError: the archive cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise ArchiveRefused(f"{out} is not a folder: name another one with --out")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = [(path, out / path.name) for path in (key, *files)]
    for path, copy in found:
        if copy.exists() and not _begins_as(path, copy):
            what = "holds the archive of another log" if path == key else f"has another {copy.name} already"
            raise ArchiveRefused(f"{out} {what}: name another folder")
    for path, copy in found:
        if copy.exists() and copy.stat().st_size == path.stat().st_size:
            continue
        part = copy.with_name(f"{copy.name}.part")
        with naming_full_disk(copy):
            shutil.copy2(path, part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(part, copy)
    sync_folder(out)
    return [copy for _, copy in found[1:]]


def _begins_as(path: Path, copy: Path) -> bool:
    """Return whether a file begins with all bytes of its copy."""
    size = copy.stat().st_size
    if path.stat().st_size == size:
        return filecmp.cmp(path, copy, shallow=False)
    with path.open("rb") as file:
        return file.read(size) == copy.read_bytes()

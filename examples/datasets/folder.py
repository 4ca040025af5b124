"""The folder of data sets on this machine, and the check of a file's digest."""

import hashlib
import os
from pathlib import Path

from atoll.ground.printable import count_of
from atoll.ground.text_files import NotText, text_of
from atoll.task.errors import TaskBroken

VARIABLE = "ATOLL_DATA"
"""The environment variable with the folder of all data sets."""

SUMS = "SHA256SUMS"
"""The file beside others that lists their digests, as `sha256sum` writes and checks it."""


class NoData(FileNotFoundError):
    """A file or folder is missing; the message says where it was looked for."""


class BadData(TaskBroken):
    """A file is damaged or of another kind; the message says what is wrong, and where."""


class WrongPlace(NoData):
    """A place that no mount puts right: a variable that is not set, a folder where a file must be."""


def data_folder(name: str) -> Path:
    """Return the folder of one data set: `$ATOLL_DATA/name`.

    Raises:
        WrongPlace: the variable is not set.
        NoData: there is no such folder in it.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        raise WrongPlace(f"{VARIABLE} is not set; set it to the folder in which {name}/ lies")
    folder = Path(root, name)
    if not folder.is_dir():
        folders = sorted(path.name for path in Path(root).iterdir() if path.is_dir()) if Path(root).is_dir() else []
        raise NoData(f"{VARIABLE}={root}: there is no folder {name} in it (folders: {', '.join(folders) or 'none'})")
    return folder


def find(folder: Path, *names: str) -> Path:
    """Return the first of these files that exists.

    Raises:
        NoData: none does.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise NoData(f"{folder}: has none of the files {', '.join(names)}")


def read_checked(path: Path, sha256: str | None = None) -> bytes:
    """Return the bytes of a file, after checking their digest.

    Args:
        path: of the file.
        sha256: its digest in hexadecimal; None: the one in the `SHA256SUMS` beside it, if there is such a file.

    Raises:
        NoData: there is no such file, or (WrongPlace) a folder.
        BadData: it has another digest, or the `SHA256SUMS` beside it does not list it or is no text.
    """
    if path.is_dir():
        raise WrongPlace(f"{path}: is a folder, but must be a file")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise NoData(f"{path}: there is no such file") from None
    expected, source = (sha256, "") if sha256 is not None else (_digest_beside(path), f" by its {SUMS}")
    found = hashlib.sha256(content).hexdigest()
    if expected is not None and found != expected.lower():
        raise BadData(
            f"{path}: {count_of(len(content), 'byte')} with the SHA-256 {found}; expected{source}: {expected}"
        )
    return content


def _digest_beside(path: Path) -> str | None:
    sums = path.parent / SUMS
    if not sums.is_file():
        return None
    try:
        lines = text_of(sums.read_bytes(), sums).splitlines()
    except NotText as error:
        raise BadData(str(error)) from error
    for number, line in enumerate(lines, start=1):
        digest, _, name = line.strip().partition(" ")
        if line.strip() and (len(digest) != 64 or not name.strip()):
            raise BadData(f"{sums}: line {number} is {line!r}, but must be a SHA-256 and a name")
        if name.strip().removeprefix("*").removeprefix("./") == path.name:  # of `sha256sum -b` and `sha256sum ./*`
            return digest
    raise BadData(f"{sums}: does not list {path.name}, so its digest cannot be checked; add its line")

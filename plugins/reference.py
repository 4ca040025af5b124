"""References to Python objects, as operators write them: `module:attribute` or `path/to/file.py:attribute`.

A reference names code that this machine's operator installed; no name from the wire is resolved.

A file is loaded under a private name, which no folder has. A `DataLoader` with `spawn` or `forkserver` (Python 3.14
starts by it), `multiprocessing` and joblib send classes and functions by the name of their module, and give the child
the parent's `sys.path`. So a folder of stub modules is on that path: the stub of a name loads the file under that name.
"""

import hashlib
import importlib
import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from atoll.ground.text_files import wide_encoding

MOVED = {
    "atoll.parallel.flower.optimizers": "atoll.flower.native.optimizers",
    "atoll.parallel.flower.rules": "atoll.flower.native.rules",
}
"""Modules of Atoll that the settings of runs name, by the names under which older journals have them."""

_loading: ContextVar[str] = ContextVar("_loading", default="")


class ReferenceNotFound(ValueError):
    """A reference that is malformed, or whose file or module does not exist.

    The message names the place where it was looked for.
    """


def load_module(reference: str) -> ModuleType:
    """Import the module or the file that a reference names.

    During the import the file's folder (for a module: the current folder) is first on `sys.path`, and last from then
    on: a file may import its neighbours, also later, and they shadow no module of ours. A file is loaded under a
    private name, so that a user's `server.py` or `client.py` collides with nothing.

    Raises:
        ReferenceNotFound: no reference, no such file or module.
        Exception: any error that the user's module raises.
    """
    place, _ = split(reference)
    before = _loading.set(place)
    try:
        return _file_module(place, reference) if is_file(place) else _named_module(place, reference)
    finally:
        _loading.reset(before)


def resolve(reference: str) -> object:
    """Return the attribute that a reference names, from its module or file.

    Raises:
        ReferenceNotFound: no reference, no such file, module or attribute.
        Exception: any error that the user's module raises.
    """
    place, attribute = split(reference)
    module = load_module(reference)
    if not hasattr(module, attribute):
        raise ReferenceNotFound(f"{reference}: there is no {attribute} in {place}")
    return getattr(module, attribute)


def check_reference(reference: str) -> str:
    """Check that a string has the form of a reference, and return it; else raise ValueError. Imports nothing."""
    try:
        split(reference)
    except ValueError:
        raise ValueError("allowed: module:attribute or path/to/file.py:attribute") from None
    return reference


def loaded_now() -> str:
    """Return the file or module that is being loaded around this call, or ""."""
    return _loading.get()


def split(reference: str) -> tuple[str, str]:
    """Split a reference into module or file, and attribute.

    Raises:
        ReferenceNotFound: the string does not have the form of a reference.
    """
    place, colon, attribute = reference.rpartition(":") if isinstance(reference, str) else ("", "", "")
    if not (colon and place and attribute.isidentifier()):
        raise ReferenceNotFound(f"{reference!r} is neither module:attribute nor path/to/file.py:attribute")
    return MOVED.get(place, place), attribute


def is_file(place: str) -> bool:
    """Return whether the part before the colon names a file rather than a module."""
    return place.endswith(".py") or "/" in place


def _file_module(place: str, reference: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise ReferenceNotFound(f"{reference}: there is no file {path}")
    if encoding := wide_encoding(path.read_bytes()[:4]):
        raise ReferenceNotFound(f"{path}: is {encoding}; save it as UTF-8")
    name = f"_atoll_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ReferenceNotFound(f"{reference}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        with _first_on_path(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _let_children_find(name, path)
    return module


def _named_module(place: str, reference: str) -> ModuleType:
    try:
        with _first_on_path(Path.cwd()):
            return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module exists, and misses another one
        message = f"{reference}: there is no module {error.name} in {Path.cwd()} or on sys.path"
        raise ReferenceNotFound(message) from error


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


# ------------------------------------------------------------ child processes

NOTE = '''\
"""Loads {path!r} in a child process."""
import importlib.util, sys
sys.path.insert(0, {folder!r})
try:
    _spec = importlib.util.spec_from_file_location(__name__, {path!r})
    sys.modules[__name__] = _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
finally:
    sys.path.remove({folder!r})
    if {folder!r} not in sys.path:
        sys.path.append({folder!r})
'''


def _let_children_find(name: str, path: Path) -> None:
    """Make a file importable under a private name in the processes that this one starts.

    If no private folder can be written, nothing happens: then only forked processes know the module.
    """
    with suppress(OSError):
        folder = folder_of_notes()
        note = folder / f"{name}.py"
        text = NOTE.format(path=str(path), folder=str(path.parent))
        if not note.exists() or note.read_text("utf-8") != text:
            part = folder / f"{name}.{os.getpid()}.part"
            part.write_text(text, "utf-8")
            part.replace(note)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def folder_of_notes() -> Path:
    """Return the folder of the stub modules, which only this user can write.

    It is one for all processes of a user, because a worker that is killed removes nothing.

    Raises:
        OSError: it cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / f"atoll-tasks-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="atoll-tasks-"))  # another user made it first

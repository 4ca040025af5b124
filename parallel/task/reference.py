"""References to Python objects, as operators write them: `module:attribute` or `path/to/file.py:attribute`.

A reference names code that this machine's operator installed; no name that came over the wire is resolved.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from atoll.aggregation.text_files import wide_encoding
from atoll.parallel.task.children import let_children_find

_loading: ContextVar[str] = ContextVar("_loading", default="")


class ReferenceNotFound(ValueError):
    """The text is no reference, or its file or module does not exist; the message says which one was looked for, and
    where.
    """


def load_module(reference: str) -> ModuleType:
    """Import the module or the file that a reference names.

    During the import the file's folder (for a module: the current folder) is first on `sys.path`, and last from then
    on: a file may import its neighbours, also later, and none of them shadows a module of ours. A file is loaded under
    a private name, so that a user's `server.py` or `client.py` collides with nothing.

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


def loaded_now() -> str:
    """Return the file or module that is being loaded around this call; empty: none is."""
    return _loading.get()


def split(reference: str) -> tuple[str, str]:
    """Split a reference into module or file, and attribute.

    Raises:
        ReferenceNotFound: the text has not the form of a reference.
    """
    place, colon, attribute = reference.rpartition(":") if isinstance(reference, str) else ("", "", "")
    if not (colon and place and attribute.isidentifier()):
        raise ReferenceNotFound(f"{reference!r} is neither module:attribute nor path/to/file.py:attribute")
    return place, attribute


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
        raise ReferenceNotFound(f"{reference}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        with _first_on_path(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    let_children_find(name, path)
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

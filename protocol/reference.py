"""References to Python objects, as operators write them: `module:attribute` or `path/to/file.py:attribute`.

What a reference names is code that this machine's own operator installed; nothing that came over the wire is resolved.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated

from pydantic import AfterValidator

from atoll.protocol.settings import ConfigError


def resolve(reference: str) -> object:
    """Import the module or the file, and return its attribute.

    While it is imported, its folder (for a module: the current one) stands first on `sys.path`.

    Raises:
        ConfigError: no reference, no such file, module or attribute, or its code raised while it was imported.
    """
    try:
        place, attribute = _split(reference)
        folder = Path(place).resolve().parent if place.endswith(".py") else Path.cwd()
        with _first_on_path(folder):
            module = _from_file(Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # the user's own code runs here: whatever it raises is the operator's to read
        raise ConfigError([f"{reference}: cannot be loaded: {type(error).__name__}: {error}"]) from error
    if not hasattr(module, attribute):
        raise ConfigError([f"{reference}: there is no {attribute} in {place}"])
    return getattr(module, attribute)


def _split(reference: str) -> tuple[str, str]:
    place, colon, attribute = reference.rpartition(":")
    if not (colon and place and attribute.isidentifier()):
        raise ValueError("allowed: module:attribute or path/to/file.py:attribute")
    return place, attribute


def _from_file(path: Path) -> ModuleType:
    """Execute a file as a module of a private name, so that a user's own `server.py` collides with nothing."""
    name = f"_atoll_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def check_reference(reference: str) -> str:
    """The reference itself; ValueError when it has not the form of one. Nothing is imported."""
    _split(reference)
    return reference


Reference = Annotated[str, AfterValidator(check_reference)]
"""The type of a setting that `resolve` will take."""

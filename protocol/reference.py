"""References in settings: `module:attribute` or `path/to/file.py:attribute`, and what they name."""

from collections.abc import Collection
from typing import Annotated

from pydantic import AfterValidator

from atoll.parallel.task.reference import ReferenceNotFound, load_module, split
from atoll.protocol.settings import ConfigError


def resolve(reference: str) -> object:
    """Import the module or the file, and return its attribute.

    Raises:
        ConfigError: no reference, no such file, module or attribute, or its code raised while it was imported.
    """
    try:
        place, attribute = split(reference)
        module = load_module(reference)
    except ReferenceNotFound as error:
        raise ConfigError([str(error)]) from error
    except Exception as error:  # the user's own code runs here: whatever it raises is the operator's to read
        raise ConfigError([f"{reference}: cannot be loaded: {type(error).__name__}: {error}"]) from error
    if not hasattr(module, attribute):
        raise ConfigError([f"{reference}: there is no {attribute} in {place}"])
    return getattr(module, attribute)


def check_reference(reference: str) -> str:
    """The reference itself; ValueError when it has not the form of one. Nothing is imported."""
    try:
        split(reference)
    except ValueError:
        raise ValueError("allowed: module:attribute or path/to/file.py:attribute") from None
    return reference


def check_known_or_reference(name: str, known: Collection[str], kind: str) -> str:
    """The name itself; ValueError when it is neither known nor of the form of a reference to a user's own `kind`."""
    if name not in known:
        try:
            check_reference(name)
        except ValueError:
            names = " | ".join(f'"{name}"' for name in known)
            raise ValueError(f"allowed: {names} | module:{kind} | path/to/file.py:{kind}") from None
    return name


Reference = Annotated[str, AfterValidator(check_reference)]
"""The type of a setting that `resolve` will take."""

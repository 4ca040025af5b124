"""The references in settings, `module:attribute` or `path/to/file.py:attribute`, and their resolution."""

from typing import Annotated

from pydantic import AfterValidator

from atoll.parallel.task.reference import ReferenceNotFound, load_module, split
from atoll.protocol.settings import ConfigError


def resolve(reference: str) -> object:
    """Import the module or the file of a reference, and return its attribute.

    Raises:
        ConfigError: it is no reference, there is no such file, module or attribute, or its code raised on import.
    """
    try:
        place, attribute = split(reference)
        module = load_module(reference)
    except ReferenceNotFound as error:
        raise ConfigError([str(error)]) from error
    except Exception as error:  # user code runs here and may raise anything: the operator reads it
        raise ConfigError([f"{reference}: cannot be loaded: {type(error).__name__}: {error}"]) from error
    if not hasattr(module, attribute):
        raise ConfigError([f"{reference}: there is no {attribute} in {place}"])
    return getattr(module, attribute)


def check_reference(reference: str) -> str:
    """Return a text if it has the form of a reference; raises ValueError. Imports nothing."""
    try:
        split(reference)
    except ValueError:
        raise ValueError("allowed: module:attribute or path/to/file.py:attribute") from None
    return reference


Reference = Annotated[str, AfterValidator(check_reference)]
"""Type of a setting whose value `resolve` accepts."""

"""The object of a user's codec, as far as it is known without numpy."""

from collections.abc import Mapping
from typing import Any

METHODS = ("num_bytes", "encode", "decode")


def is_codec(found: object) -> bool:
    """Return whether an object, no class, has the methods of a codec."""
    return not isinstance(found, type) and all(callable(getattr(found, name, None)) for name in METHODS)


def made(loaded: Any, options: Mapping[str, Any]) -> Any:
    """Return the codec that an entry point stands for: the object itself, or what a class or function makes.

    Raises:
        ValueError: it takes no options, or refuses these.
    """
    if is_codec(loaded):
        if options:
            raise ValueError("codec_options: the codec is an object and takes none; allowed: a class or a function")
        return loaded
    if not callable(loaded):
        return loaded  # `OwnCodec.of` says why it is none
    try:
        return loaded(**options)
    except (Exception, SystemExit) as error:  # the user's code runs here and may raise anything
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"codec_options: {what}") from error

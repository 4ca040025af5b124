"""The failure of a training, as its command reports it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why a training cannot continue."""

    code: int
    """The exit code of the command."""
    lines: tuple[str, ...]
    """The lines of the message, or of a traceback."""

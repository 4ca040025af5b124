"""The destination of an export, which is the exporter's only memory.

So a killed export resumes without a gap and without a repetition.
"""

from collections.abc import Sequence
from typing import Protocol

from atoll.exports.rows import About, Row, State
from atoll.protocol.settings import ConfigError


class ExportRefused(ConfigError):
    """A destination that cannot take this run; the message says why, and the way out."""

    def __init__(self, fault: str) -> None:
        super().__init__([fault])


class DestinationAway(OSError):
    """A destination that fails at present, such as a server that does not answer: the same export resumes later."""


class Destination(Protocol):
    """A tool's files, or its server, which take the rows of one run."""

    place: str
    """The place for the operator: a folder, a file or an address."""

    def check(self) -> None:
        """Check that the destination can be used, before anything is exported.

        Raises:
            OSError: the place cannot be used; a `DestinationAway` may pass.
        """

    def begin(self, about: About) -> None:
        """Open the run, made when it is missing; read which rows it has; write the settings if they differ.

        Raises:
            ExportRefused: the place has another run, or another process exports this one to it.
            OSError: the place cannot be used.
        """

    def lacks(self, row: Row) -> bool:
        """Return whether some number of the row is missing."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows that are missing; on return they are durable."""

    def state(self, state: State) -> None:
        """Write the state of the run, if it differs from the last one."""

    def close(self) -> None:
        """Close the destination's files or connection, and release its lock."""


class Steps:
    """Index of the steps that a destination has, by the first name of each row."""

    def __init__(self) -> None:
        self._steps: dict[str, set[int]] = {}

    def add(self, name: str, step: int) -> None:
        """Record that the destination has the row with this first name."""
        self._steps.setdefault(name, set()).add(step)

    def lack(self, row: Row) -> bool:
        """Return whether the destination lacks the row: it has the row's step under none of the row's names."""
        return not any(row.step in self._steps.get(name, ()) for name in row.values)

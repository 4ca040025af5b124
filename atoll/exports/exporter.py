"""The exporter: it writes the rows of a source that the destination lacks."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Self

from atoll.exports.destination import Destination
from atoll.exports.rows import About, Row, State

ROWS_AT_ONCE = 500
"""The most rows that are in memory before they are written."""

REST = 4.0
"""The rest of a follower after each look, as a multiple of the time that the look took."""

LOOK_MIN_S = 0.5
"""The least rest of a follower [s]."""

PENDING_S = 1.0
"""The longest time for which rows of a run in this process wait to be written [s]."""


class Source(Protocol):
    """A run whose rows can be read, as far as they are final."""

    def about(self) -> About:
        """Return the description of the run."""

    def rows(self) -> Iterable[Row]:
        """Return all rows that are final now, again at each call."""

    def state(self) -> State:
        """Return the state of the run."""


def export(source: Source, destination: Destination) -> tuple[int, State]:
    """Write all rows that the destination lacks, then the state; return their number and the state.

    Args:
        source: the run.
        destination: a destination that has begun with this run.
    """
    state = source.state()  # before the rows: those of a run that has ended are complete
    num_written, missing = 0, []
    for row in source.rows():
        if row.values and destination.lacks(row):
            missing.append(row)
        if len(missing) >= ROWS_AT_ONCE:
            destination.write(missing)
            num_written, missing = num_written + len(missing), []
    if missing:
        destination.write(missing)
    destination.state(state)
    return num_written + len(missing), state


def follow(
    source: Source,
    destination: Destination,
    *,
    wait: Callable[[float], None],
    passing: tuple[type[Exception], ...] = (),
    clock: Callable[[], float] = time.monotonic,
) -> tuple[int, State]:
    """Export until the run has ended; return the number of rows, and the state.

    Args:
        source: the run.
        destination: a destination that has begun with this run.
        wait: waits for news, at least for these seconds.
        passing: the errors of a look after which the next one may succeed.
        clock: the present instant [s], monotonic.
    """
    total = 0
    while True:
        begun = clock()
        try:
            num_written, state = export(source, destination)
        except passing:
            num_written, state = 0, State("running")
        total += num_written
        if state.has_ended:
            return total, state
        wait(max(LOOK_MIN_S, REST * (clock() - begun)))


class LiveSource(Source, Protocol):
    """A run in progress in this process."""

    def row_of(self, document: Mapping[str, Any]) -> Row | None:
        """Return the row of what the run has just logged; None: it has no numbers."""

    def note(self) -> str:
        """Return what an export leaves out; empty: nothing."""


class LiveExport:
    """The export of a run while it runs in this process; a destination that fails does not disturb the run.

    As a context it ends with the run. A run that was refused before it began is not exported.

    Args:
        destinations: the destinations.
        source: the run, whose files are read at the beginning and at the end.
        tell: tells the operator of a destination that has failed.
    """

    def __init__(self, destinations: Iterable[Destination], source: LiveSource, tell: Callable[[str], None]) -> None:
        self._open, self._source, self._tell = list(destinations), source, tell
        self._has_begun = False
        self._pending: list[Row] = []
        self._written_at = time.monotonic()

    def check(self) -> None:
        """Check that each destination can be used, before the run begins.

        Raises:
            OSError: one cannot be used.
        """
        for destination in self._open:
            destination.check()

    def take(self, document: Mapping[str, Any]) -> None:
        """Take a line of the run's log, whose numbers are written within a second or so, or at the end."""
        if not self._open:
            return
        if not self._has_begun:
            self._begin()
        if (row := self._source.row_of(document)) is not None:
            self._pending.append(row)
        if self._pending and time.monotonic() - self._written_at >= PENDING_S:
            self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write what is pending, and the end of the run."""
        if self._open and not self._has_begun and kind is None:
            self._begin()
        if self._has_begun:
            self._write()
            self._each(lambda destination: export(self._source, destination))
        for destination in self._open:
            destination.close()
        self._open = []

    def _begin(self) -> None:
        """Open the destinations, and write the rows of earlier processes, and those until now."""
        self._has_begun = True
        if left_out := self._source.note():
            self._tell(left_out)
        self._each(lambda destination: destination.begin(self._source.about()))
        self._each(lambda destination: export(self._source, destination))

    def _write(self) -> None:
        rows, self._pending, self._written_at = self._pending, [], time.monotonic()
        self._each(lambda one: one.write([row for row in rows if row.values and one.lacks(row)]))

    def _each(self, work: Callable[[Destination], object]) -> None:
        """Do the work at each destination; one that fails is left out from then on."""
        for destination in list(self._open):
            try:
                work(destination)
            except Exception as error:  # any: a tool's own library
                self._open.remove(destination)
                destination.close()
                why = " ".join(str(error).split()) or type(error).__name__
                self._tell(
                    f"the export to {destination.place} has ended: {why}; the run continues, and `atoll export` writes "
                    "what is missing"
                )

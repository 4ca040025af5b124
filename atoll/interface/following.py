"""The events of a deployed run as they come: a generator and its asynchronous twin over one thread that reads."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from atoll.interface.errors import one_error

if TYPE_CHECKING:
    from atoll.operations.following import Ending

Kind = Literal["began", "event", "record", "jumped", "waiting"]
Document = Mapping[str, Any]
Item = dict[str, Any]
Open = Callable[["Ending"], Generator[Item]]
"""(request to end it) -> the items of a run."""


@dataclass(frozen=True)
class Event:
    """An item of `DeployedRun.follow`.

    Args:
        document: all of it, as a line of `atoll run show --follow --json`.
    """

    document: Document

    @property
    def kind(self) -> Kind:
        """The kind: `began`, `event`, `record`, `jumped` or `waiting`.

        `began` has the position from which the journal is followed, `event` an entry of the journal, `record` the
        present state of the open round, `jumped` a gap between the entries, `waiting` the reason why no entry can come
        at present.
        """
        found: Kind = self.document["kind"]
        return found

    @property
    def seq(self) -> int | None:
        """The number of the last journal entry that the item includes: `follow(after=seq)` continues after it."""
        return self.document.get("seq")

    @property
    def at(self) -> float | None:
        """The time [s since the epoch]."""
        return self.document.get("at")

    @property
    def name(self) -> str:
        """The name of an event, such as `UpdateReceived`; empty for other kinds."""
        return str(self.document.get("event", ""))

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of the coordinator's log about the event; of a gap or a wait the reason."""
        reason = [why] if (why := self.document.get("why")) else []
        return tuple([*self.document.get("lines", ()), *reason])

    @property
    def records(self) -> tuple[Document, ...]:
        """The records of the rounds that the event has ended or changed, as `atoll round show --json`."""
        record = self.document.get("record")
        return tuple([*self.document.get("records", ()), *([] if record is None else [record])])

    @property
    def run(self) -> Document | None:
        """The run's state, version and open round, if the event begins or changes them."""
        return self.document.get("run")

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def __repr__(self) -> str:
        return f"Event({' '.join(filter(None, [self.kind, self.name, str(self.seq or '')]))})"

    def _repr_html_(self) -> str:
        import html

        return "".join(f"<p>{html.escape(line)}</p>" for line in self.lines)


class _Followed:
    """The items of a run, read on one thread, an item at each call."""

    def __init__(self, open_items: Open) -> None:
        from atoll.operations.following import Ending

        self._ending, self._thread = Ending(), ThreadPoolExecutor(1, "atoll-follow")
        self._items = open_items(self._ending)

    def next(self) -> "Future[Item | None]":
        """Return the next item, which comes later; None at the end."""
        return self._thread.submit(next, self._items, None)

    def close(self) -> None:
        """Stop reading the events: the thread leaves its wait, closes its source, and ends."""
        self._ending.ask()
        self._thread.submit(self._items.close)
        self._thread.shutdown(wait=False)


def events(open_items: Open) -> Generator[Event]:
    """Yield the events until the run has ended.

    Raises:
        AtollError: as `DeployedRun.follow`.
    """
    followed = _Followed(open_items)
    try:
        while (item := _result(followed.next())) is not None:
            yield Event(item)
    finally:
        followed.close()


async def async_events(open_items: Open) -> AsyncGenerator[Event]:
    """Yield the events until the run has ended; the loop keeps running; errors as `events`."""
    followed = _Followed(open_items)
    try:
        while True:
            coming = followed.next()
            with one_error():
                item = await asyncio.wrap_future(coming)
            if item is None:
                return
            yield Event(item)
    finally:
        followed.close()


def _result(coming: "Future[Item | None]") -> Item | None:
    with one_error():
        return coming.result()

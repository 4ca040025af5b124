"""The page of a list that a caller asks for: where it begins, how long it is, and which rows count. Pure."""

from collections.abc import Iterator
from typing import Any, Self

from atoll.ground.printable import count_of
from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import Fate, Phase

COUNT_MAX = 1_000
"""Largest number of rows of one page."""

NUMBER_MAX = 2**31 - 1
TEXT_MAX = 256
"""Largest number of characters of a filter or of a name."""

STATES = {
    "rounds": (*map(str, Phase), "open", "closed"),
    "clients": ("connected", "away", "failed"),
}
"""States by which the rows of a view can be filtered; the last two of rounds are for exchanges."""

FILTERS = {"rounds": ("state", "fate", "client", "text"), "clients": ("state", "prefix", "text"), "versions": ()}
"""Filters of each view that is read by pages."""


@value
class Paging:
    """Page of a view's rows, of at most `count` of them after the row `after`.

    With `last` the page is read from the newest row to older ones: then `after` is the row before which it continues.
    Without `count` all rows are meant, and no other field counts but `whole` and `bare`.
    """

    count: int | None = None
    after: str = ""
    """Number of a round or a version, or name of a client; empty: from the first, or the newest, row."""
    last: bool = False
    state: str = ""
    fate: str = ""
    """A round counts if a client, or the filter's client, has this fate in it."""
    client: str = ""
    """A round counts if it has invited this client."""
    text: str = ""
    """Part of the names and reasons in a row, in either case."""
    prefix: str = ""
    """Beginning of a client's name."""
    whole: bool = False
    """Whether curves have all points, instead of 2,000 each."""
    bare: bool = False
    """Whether the document of a run has no metrics, which cost a look at every evaluation."""

    @property
    def number(self) -> int:
        """The cursor as a number; 0: there is none."""
        return int(self.after or 0)

    @property
    def is_filtered(self) -> bool:
        """Return whether some rows may not count."""
        return bool(self.state or self.fate or self.client or self.text or self.prefix)

    def beginning_at(self, after: str, count: int) -> Self:
        """Return another page of the same rows."""
        return type(self)(
            count, after, self.last, self.state, self.fate, self.client, self.text, self.prefix, self.whole
        )

    def faults(self, view: str) -> Iterator[str]:
        """Yield what is wrong with this page of a view, one sentence each."""
        if self.count is not None and not 1 <= self.count <= COUNT_MAX:
            yield f"count: got {self.count}; allowed: 1 to {COUNT_MAX:,}"
        if self.count is None and (self.after or self.last or self.is_filtered):
            yield f"a cursor or a filter needs a count; allowed: 1 to {COUNT_MAX:,}"
        if self.count is not None and view not in FILTERS:
            yield f"the view {view!r} is not read by pages; allowed: {', '.join(FILTERS)}"
            return
        is_number = self.after.isascii() and self.after.isdecimal() and len(self.after) < 11
        if view != "clients" and self.after and not (is_number and int(self.after) <= NUMBER_MAX):
            yield f"after: got {self.after[:TEXT_MAX]!r}; allowed: the number of a row, 0 to {NUMBER_MAX}"
        if self.last and view == "clients":
            yield "last: clients are listed by name; name the one after which the page begins"
        yield from self._faults_of_filters(view)

    def _faults_of_filters(self, view: str) -> Iterator[str]:
        known = FILTERS.get(view, ())
        for name in ("state", "fate", "client", "text", "prefix", "after"):
            found: str = getattr(self, name)
            if found and name != "after" and name not in known:
                yield f"{name}: the view {view!r} has no such filter; allowed: {', '.join(known) or 'none'}"
            elif len(found) > TEXT_MAX:
                yield f"{name} has {count_of(len(found), 'character')}; allowed: at most {TEXT_MAX}"
        if self.state and view in STATES and self.state not in STATES[view]:
            yield f"state: got {self.state[:TEXT_MAX]!r}; allowed: {', '.join(STATES[view])}"
        if self.fate and self.fate not in list(Fate):
            yield f"fate: got {self.fate[:TEXT_MAX]!r}; allowed: {', '.join(Fate)}"


ALL = Paging()
"""All rows, with thinned curves."""


def rows_of(seen: Any) -> list[dict[str, Any]]:
    """Return the rows of a view's answer."""
    found: list[dict[str, Any]] = seen["rows"]
    return found

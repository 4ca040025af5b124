"""The rows of a run by pages: its rounds, its clients, its versions. Each page costs the same, however many there are.

A page with filters looks at a limited number of rows: it may be shorter than asked for, or empty, and still name the
row after which the next one begins.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from atoll.protocol.paging import Paging
from atoll.protocol.vocabulary import ClientId

Document = dict[str, Any]
Numbered = tuple[str, Document]

LOOKED_AT_MAX = 10_000
"""Largest number of rounds that one page with filters looks at."""

CLIENTS_LOOKED_AT_MAX = 4_000
"""Largest number of clients that one page with filters looks at: each costs three times as much."""


def page(
    rows: Iterable[Numbered], paging: Paging, fits: Callable[[Document], bool], most: int = LOOKED_AT_MAX
) -> Document:
    """Return the rows of a page and the cursor of the next one.

    Args:
        rows: the rows from the page's beginning on, each with its cursor, in the order of reading.
        paging: the page.
        fits: says whether a row counts.
        most: the largest number of rows to look at.

    Returns:
        `rows`, the oldest first also when the newest were read first, and `next`: the cursor of the next page; None:
        there is no further row.
    """
    assert paging.count is not None
    found: list[Document] = []
    cursor, looked_at, following = "", 0, None
    for at, row in rows:
        if len(found) == paging.count or looked_at == most:
            following = cursor
            break
        cursor, looked_at = at, looked_at + 1
        if fits(row):
            found.append(row)
    return {"rows": found[::-1] if paging.last else found, "next": following}


def fits_round(paging: Paging) -> Callable[[Document], bool]:
    """Return the filter of rounds by state, text and, without a client, fate."""
    text = paging.text.casefold()

    def fits(row: Document) -> bool:
        if paging.state and row["phase"] != paging.state:
            return False
        if paging.fate and not paging.client and not row.get(paging.fate):
            return False
        said = (row["reason"], row.get("detail", ""), *row.get("kinds", ()), *row.get("errors", ()))
        return not text or text in " ".join(said).casefold()

    return fits


def fits_client(paging: Paging) -> Callable[[Document], bool]:
    """Return the filter of clients by state and text."""
    text = paging.text.casefold()

    def fits(row: Document) -> bool:
        failure = row["last_failure"] or {}
        is_of_state = {
            "": True,
            "connected": row["connected"],
            "away": not row["connected"],
            "failed": bool(failure),
        }[paging.state]
        if not is_of_state or not row["client"].startswith(paging.prefix):
            return False
        said = (row["client"], row["label"], row["software"], row["why_not"], *map(str, failure.values()))
        return not text or text in " ".join(said).casefold()

    return fits


def merged(*names: Iterable[str]) -> Iterator[ClientId]:
    """Yield the names of several sorted sequences in order, each once."""
    before = None
    for name in heapq.merge(*names):
        if name != before:
            yield ClientId(name)
            before = name


def after(names: Iterable[str], paging: Paging) -> list[str]:
    """Return the names of a page and the ones behind it, sorted."""
    return sorted(name for name in names if name > paging.after and name.startswith(paging.prefix))


def chunks(rows: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yield rows in lists of a size."""
    while some := [*islice(rows, size)]:
        yield some

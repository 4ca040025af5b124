"""Lists of numbered rows, rounds and versions: the newest ones, or the ones after a number."""

from pathlib import Path
from typing import Any

from atoll.cli.printing import note
from atoll.operations.views import read_pages
from atoll.protocol.paging import ALL, COUNT_MAX, Paging

NUMBER = {"rounds": "round", "versions": "version"}
"""Key of a row's number, by view."""


def read_numbered(
    view: str,
    state: Path,
    database: str,
    *,
    run: str,
    last: int | None,
    after: int | None,
    paging: Paging = ALL,
) -> Any:
    """Return the rows of a view that `--last` and `--after` ask for, and note which ones are left out.

    Args:
        view: `rounds` or `versions`.
        state: the coordinator's state directory.
        database: URL of the PostgreSQL database.
        run: id or name of the run; empty: the newest run.
        last: the number of newest rows; None: 1,000.
        after: the number after which the rows begin; None: the newest rows are meant.
        paging: the filters.
    """
    most, is_forward = last or COUNT_MAX, after is not None and last is None
    begin = Paging(None, str(after or "") if is_forward else "", not is_forward, fate=paging.fate, client=paging.client)
    seen = read_pages(view, state, database, run=run, paging=begin, most=most)
    rows = seen["rows"]
    if is_forward:
        if seen["next"] is not None:
            note(f"more {view} follow: --after {seen['next']}")
        return seen
    shown = [row for row in rows if after is None or row[NUMBER[view]] > after]
    if seen["next"] is not None and len(shown) == len(rows) and last is None:
        note(f"these are the newest {len(rows):,}; earlier {view}: --after 0, or a larger --last")
    return seen | {"rows": shown}

"""The page of the conditions that hold now at a coordinator or a site, each with the page to look at."""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import Cell, Page, TableBlock, cell, left_out

Document = Mapping[str, Any]

ROWS_MAX = 1_000

EVERY_S = 5
"""Seconds after which the page is read again."""

MARKS = {"critical": "failed", "error": "failed", "warning": "late", "info": "waiting"}
"""The state that gives a level its sign and colour."""

PAGES = {
    "audit": ("audit", "Audit"),
    "away": ("members", "Members"),
    "certificate": ("members", "Members"),
    "AtollCertificateEnds": ("members", "Members"),
}
"""The page of the coordinator to look at for a condition that is of no run."""


def alerts(place: int, label: str, rows: Sequence[Document], tabs: Sequence[tuple[str, str]]) -> Page:
    """Return the page of the conditions, the critical ones first.

    Args:
        place: the number of the place.
        label: its name.
        rows: the conditions, as `Federation.alerts` has them.
        tabs: the pages beside it.
    """
    table = TableBlock(
        "Alerts",
        ("level", "condition", "what holds", "look at", "what to do"),
        [_row(place, row) for row in rows[:ROWS_MAX]],
        left_out(len(rows), ROWS_MAX, "condition"),
        "no condition holds",
    )
    return Page("Alerts", [table], addresses.trail(place, label), tabs, every=EVERY_S)


def _row(place: int, row: Document) -> list[Cell]:
    level = str(row["level"])
    return [
        cell(level, mark=MARKS.get(level, "")),
        cell(row["condition"]),
        cell(row["sentence"]),
        _page_of(place, row),
        cell(row["docs"]),
    ]


def _page_of(place: int, row: Document) -> Cell:
    """Return the page to look at; a condition of this machine has none."""
    run, condition = row["run"], row["condition"]
    if run and condition == "approval":
        site = str(row["subject"]).removeprefix(f"{run} at ")
        return cell(f"site {site}", addresses.of_run(place, run, "site", name=site))
    if run:
        page = "rounds" if condition == "AtollRoundsAbandoned" else ""
        return cell(f"rounds of {run}" if page else run, addresses.of_run(place, run, page))
    if condition in PAGES:
        page, name = PAGES[condition]
        return Cell(name, addresses.of_place(place, page))
    return Cell("-")

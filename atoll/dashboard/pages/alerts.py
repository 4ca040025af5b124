"""The page of the conditions that hold now at a coordinator or a site, each with the page to look at."""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import Cell, Page, TableBlock, cell, left_out

Document = Mapping[str, Any]
Pages = Mapping[str, tuple[str, str]]

ROWS_MAX = 1_000

EVERY_S = 5
"""Seconds after which the page is read again."""

MARKS = {"critical": "failed", "error": "failed", "warning": "late", "info": "waiting"}
"""The state that gives a level its sign and colour."""

PAGES: Pages = {
    "audit": ("audit", "Audit"),
    "away": ("members", "Members"),
    "certificate": ("members", "Members"),
    "AtollCertificateEnds": ("members", "Members"),
}
"""The page of a coordinator to look at for a condition that is of no run."""

OF_AGENT: Pages = {"approval": ("agents", "Site"), "audit": ("decisions", "Decisions")}
"""The page of an agent to look at."""


def alerts(place: int, label: str, rows: Sequence[Document], *, is_agent: bool = False) -> Page:
    """Return the page of the conditions, the critical ones first.

    Args:
        place: the number of the place.
        label: its name.
        rows: the conditions, as `Federation.alerts` and `Agent.alerts` have them.
        is_agent: whether the place is an agent of a site.
    """
    pages, tabs = PAGES, addresses.tabs_of_coordinator(place)
    if is_agent:
        pages, tabs = OF_AGENT, addresses.tabs_of_agent(place)
    table = TableBlock(
        "Alerts",
        ("level", "condition", "what holds", "look at", "what to do"),
        [_row(place, row, pages) for row in rows[:ROWS_MAX]],
        left_out(len(rows), ROWS_MAX, "condition"),
        "no condition holds",
    )
    return Page("Alerts", [table], addresses.trail(place, label), tabs, every=EVERY_S)


def _row(place: int, row: Document, pages: Pages) -> list[Cell]:
    level = str(row["level"])
    return [
        cell(level, mark=MARKS.get(level, "")),
        cell(row["condition"]),
        cell(row["sentence"]),
        _page_of(place, row, pages),
        cell(row["docs"]),
    ]


def _page_of(place: int, row: Document, pages: Pages) -> Cell:
    """Return the page to look at; a condition of this machine has none."""
    run, condition = row["run"], row["condition"]
    if run and condition == "approval":
        site = str(row["subject"]).removeprefix(f"{run} at ")
        return cell(f"site {site}", addresses.of_run(place, run, "site", name=site))
    if run:
        page = "rounds" if condition == "AtollRoundsAbandoned" else ""
        return cell(f"rounds of {run}" if page else run, addresses.of_run(place, run, page))
    if condition in pages:
        page, name = pages[condition]
        return Cell(name, addresses.of_place(place, page))
    return Cell("-")

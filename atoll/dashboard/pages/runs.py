"""The page of all runs, and the members of a coordinator."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import (
    Block,
    Cell,
    Field,
    Form,
    Page,
    Sentences,
    TableBlock,
    cell,
    instant,
    left_out,
    shown,
    state_cell,
)
from atoll.ground.printable import count_of, printable

Row = Mapping[str, Any]

ROWS_MAX = 1_000
"""Largest number of rows of a table."""

SWEEPS_MAX = 50
"""Largest number of links to sweeps."""

EVERY_S = 5
"""Seconds after which the list of runs is read again."""

STATES = ("running", "waiting", "queued", "paused", "finished", "failed", "stopped", "interrupted")


@dataclass(frozen=True)
class OfPlace:
    """The runs of a place.

    Args:
        number: the number of the place.
        label: its name.
        kind: `deployed`, `agent` or `simulated`.
        rows: its runs, as `atoll run list --json`, the newest last.
        fault: why there are none; empty: it could be read.
    """

    number: int
    label: str
    kind: str
    rows: Sequence[Row] = field(default=())
    fault: str = ""


def runs(places: Sequence[OfPlace], *, state: str = "", text: str = "") -> Page:
    """Return the page of all runs, the newest first.

    Args:
        places: the places.
        state: the state of the shown runs; empty: any.
        text: a part of their names, tasks and causes, in either case; empty: any.
    """
    blocks: list[Block] = []
    for place in places:
        fields = [Field("state", "state", state, STATES), Field("text", "text", text)]
        if place.fault:
            blocks.append(Sentences(shown(place.label), [printable(place.fault)]))
            continue
        if place.kind == "agent":
            blocks.append(_of_agent(place, text))
            continue
        wanted = [row for row in reversed(place.rows) if _counts(row, state, text)]
        blocks.append(
            TableBlock(
                shown(place.label),
                ("run", "state", "version", "of", "task", "created", "cause or wait"),
                [_row(place, row) for row in wanted[:ROWS_MAX]],
                left_out(len(wanted), ROWS_MAX, "older run", "narrow by state or text"),
                "no run here yet" if not place.rows else "no such run",
                addresses.tabs_of_coordinator(place.number) if place.kind == "deployed" else [*_sweeps(place)],
                fields,
                chosen=[addresses.key_of(place.number, str(row["run"])) for row in wanted[:ROWS_MAX]],
            )
        )
    if any(place.rows and place.kind != "agent" for place in places):
        note = "choose two to twenty runs by their boxes: differing settings, and a metric over rounds, bytes or time"
        blocks.append(Form("Compare", "/compare", "Compare", note=note, id="compare"))
    notices = [f"{shown(place.label)}: {said}" for place in places for said in _notices(place.rows)]
    if notices:
        blocks.insert(0, Sentences("Notices", notices))
    return Page("Runs", blocks, every=EVERY_S)


def _sweeps(place: OfPlace) -> Iterator[tuple[str, str]]:
    """Yield the comparison of each folder with several simulations, such as a sweep, which may be the place itself."""
    cells = Counter(str(row["run"]).rpartition("/")[0] for row in place.rows)
    folders = [folder for folder in sorted(cells) if cells[folder] > 1]
    for folder in folders[:SWEEPS_MAX]:
        yield shown(f"Sweep {folder or place.label} ({cells[folder]})"), addresses.of_sweep(place.number, folder)


def _of_agent(place: OfPlace, text: str) -> TableBlock:
    """Return the runs that have asked a site, the newest first."""
    rows = sorted(place.rows, key=lambda row: -float(row["asked_at"]))
    wanted = [row for row in rows if text.lower() in f"{row['run']} {row['task']}".lower()]
    return TableBlock(
        shown(place.label),
        ("run that has asked", "standing", "task", "asked", "decided"),
        [
            (
                cell(row["run"], addresses.of_place(place.number, "decisions", actor=row["run"])),
                *(state_cell(str(row["standing"])), cell(row["task"])),
                *(instant(row["asked_at"]), instant(row["decided_at"])),
            )
            for row in wanted[:ROWS_MAX]
        ],
        left_out(len(wanted), ROWS_MAX, "older run", "narrow by text"),
        "no such run" if place.rows else "no run has asked this site yet",
        addresses.tabs_of_agent(place.number),
        [Field("text", "text", text)],
    )


def members(place: int, label: str, rows: Sequence[Row], *, role: str = "", standing: str = "", text: str = "") -> Page:
    """Return the page of the members of a coordinator.

    Args:
        place: the number of the place.
        label: its name.
        rows: the members, as `atoll client members --json`.
        role: the role of the shown ones; empty: any.
        standing: the standing of the shown ones; empty: any.
        text: a part of their names, in either case; empty: any.
    """
    roles, standings = (sorted({str(row[name]) for row in rows}) for name in ("role", "standing"))
    wanted = [
        row
        for row in rows
        if role in ("", row["role"]) and standing in ("", row["standing"]) and text.lower() in row["name"].lower()
    ]
    table = TableBlock(
        "Members",
        ("name", "role", "standing", "since", "certificate until"),
        [
            (
                *(cell(row["name"]), cell(row["role"]), state_cell(str(row["standing"]))),
                *(instant(row["since"]), instant(row["expires_at"])),
            )
            for row in wanted[:ROWS_MAX]
        ],
        left_out(len(wanted), ROWS_MAX, "member", "narrow by role, standing or name"),
        "no such member" if rows else "no member yet; invite one: atoll client invite NAME",
        (),
        [
            Field("role", "role", role, roles),
            Field("standing", "standing", standing, standings),
            Field("text", "name", text),
        ],
    )
    return Page("Members", [table], addresses.trail(place, label), addresses.tabs_of_coordinator(place))


def _counts(row: Row, state: str, text: str) -> bool:
    words = " ".join(str(row.get(name) or "") for name in ("run", "name", "task", "cause"))
    return state in ("", row["state"]) and text.lower() in words.lower()


def _row(place: OfPlace, row: Row) -> list[Cell]:
    exchanges = row.get("exchanges")
    return [
        cell(row["run"], addresses.of_run(place.number, row["run"])),
        state_cell(row["state"]),
        cell(row["version"] if exchanges is None else count_of(exchanges, "exchange")),
        cell(row["rounds"] if exchanges is None else None),
        cell(row["task"]),
        instant(row["created_at"]),
        cell(row["cause"]),
    ]


def _notices(rows: Sequence[Row]) -> list[str]:
    said = (sentence for row in rows for sentence in (*row.get("clocks", ()), *row.get("notices", ())))
    return list(dict.fromkeys(printable(str(sentence)) for sentence in said))

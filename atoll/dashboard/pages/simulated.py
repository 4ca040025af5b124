"""The pages of a simulated run: its curves and rounds, and one of its rounds."""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import (
    Block,
    Cell,
    Facts,
    Page,
    TableBlock,
    cell,
    duration,
    left_out,
    shown,
    size,
    state_cell,
    text,
    troubled_first,
)
from atoll.dashboard.pages.run import curves_of

Document = Mapping[str, Any]

EVERY_S = 2
"""Seconds after which the page of a running simulation is read again."""

ROUNDS_MAX = 200
ROWS_MAX = 1_000

NUMBERS = ("invited", "reported", "failed", "refused", "lost", "stragglers", "late", "counted")


def run(place: int, label: str, name: str, document: Document, rows: Sequence[Document], toml: str) -> Page:
    """Return the page of a simulated run.

    Args:
        place: the number of the place.
        label: its name.
        name: the folder of the run, relative to the place.
        document: the run in plain values.
        rows: the lines of its rounds.
        toml: its settings.
    """
    last: Document = rows[-1] if rows else {}
    facts = [
        ("state", state_cell(document["state"])),
        ("cause", cell(document["cause"])),
        ("task", cell(document["task"])),
        ("virtual time", duration(last.get("virtual_s"))),
        ("real time", duration(last.get("real_s"))),
        ("sent to clients", size(last.get("bytes_down"))),
        ("received", size(last.get("bytes_up"))),
        ("trainings", cell(last.get("trainings"))),
    ]
    blocks: list[Block] = [Facts("State", facts)]
    if (curves := curves_of(document["metrics"], "round")) is not None:
        blocks.append(curves)
    json = addresses.of_run(place, name, "rounds.json")
    blocks.append(
        TableBlock(
            "Rounds",
            ("round", "state", "why", "version", *NUMBERS, "took (virtual)"),
            [_row(place, name, row) for row in reversed(rows[-ROUNDS_MAX:])],
            left_out(len(rows), ROUNDS_MAX, "older round", f"{json} has all"),
            "no round has ended yet",
        )
    )
    if toml:
        blocks.append(text("Settings", toml))
    every = EVERY_S if document["state"] == "running" else 0
    lead = f"{shown(document['state'])}; version {document['version']} of {shown(document['rounds'])}"
    return Page(shown(document["run"]), blocks, addresses.trail(place, label), (), "", lead, every)


def round_(place: int, label: str, name: str, row: Document) -> Page:
    """Return the page of a simulated round; `row` is its line in the log of rounds."""
    number = int(row["round"])
    plain = {key: value for key, value in row.items() if not isinstance(value, Mapping)}
    blocks: list[Block] = [Facts("Facts", [(key.replace("_", " "), cell(value)) for key, value in plain.items()])]
    measured = [
        (cell(f"{group}/{metric}"), cell(value))
        for group in ("server", "clients", "train")
        for metric, value in (row.get(group) or {}).items()
    ]
    if measured:
        blocks.append(TableBlock("Metrics", ("metric", "value"), measured))
    if fates := row.get("fates"):
        blocks.append(_fates(row, fates))
    around = [(f"Round {number - 1}", addresses.of_run(place, name, f"rounds/{number - 1}"))] if number > 1 else []
    around.append((f"Round {number + 1}", addresses.of_run(place, name, f"rounds/{number + 1}")))
    trail = addresses.trail(place, label, name)
    return Page(f"Round {number} of {shown(name)}", blocks, trail, around, "", shown(row["state"]))


def _row(place: int, name: str, row: Document) -> list[Cell]:
    return [
        cell(row["round"], addresses.of_run(place, name, f"rounds/{row['round']}")),
        *(state_cell(str(row.get("state"))), cell(row.get("why")), cell(row.get("version"))),
        *(cell(row.get(each)) for each in NUMBERS),
        duration(row.get("round_s")),
    ]


def _fates(row: Document, fates: Mapping[str, str]) -> TableBlock:
    values = row.get("client_values") or {}
    trained = row.get("train_values") or {}
    steps = row.get("steps") or {}
    names = troubled_first(fates)
    rows = [
        (
            *(cell(name), state_cell(fates[name]), cell(steps.get(name))),
            *(cell(_of(trained.get(name))), cell(_of(values.get(name)))),
        )
        for name in names[:ROWS_MAX]
    ]
    return TableBlock(
        "Fates", ("client", "fate", "steps", "training", "evaluation"), rows, left_out(len(names), ROWS_MAX, "client")
    )


def _of(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in (values or {}).items())

"""The page of a kept result of statistics of the sites' data."""

from collections.abc import Iterator, Mapping
from typing import Any

from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import Block, Cell, Page, Sentences, TableBlock, cell, instant, left_out, shown
from atoll.interface.statistics import Rows, Split, headline, parts_of

CELLS_MAX = 10_000
"""Largest number of cells of the page; a row has at most `COLUMNS_MAX` of them."""

COLUMNS_MAX, ROWS_MAX, SENTENCES_MAX = 300, 1_000, 200


def statistics(place: int, label: str, found: Mapping[str, Any]) -> Page:
    """Return the page of a kept result.

    Args:
        place: the number of the place.
        label: its name.
        found: the result, as `atoll run statistics --show N --json`.
    """
    number, split = int(found["number"]), ""
    lead = shown(headline(found, instant(found["ended_at"]).text))
    blocks, said, left = list[Block](), list[str](), CELLS_MAX
    for part in parts_of(found):
        match part:
            case Split(name):
                blocks += _sentences(split, said)
                split, said = name, []
            case Rows():
                blocks += _sentences(split, said)
                block = _table(split, part, left)
                blocks.append(block)
                left, said = left - sum(map(len, block.rows)), []
            case str():
                said.append(part)
    blocks += _sentences("", said)
    around = [(f"Statistics {number - 1}", addresses.of_place(place, "statistics", number=number - 1))]
    around.append(("Newest", addresses.of_place(place, "statistics")))
    tabs = [*addresses.tabs_of_coordinator(place), *(around if number > 1 else around[1:])]
    return Page(f"Statistics {number}", blocks, addresses.trail(place, label), tabs, lead=lead)


def _sentences(split: str, said: list[str]) -> Iterator[Sentences]:
    if said:
        note = left_out(len(said), SENTENCES_MAX, "sentence")
        yield Sentences(f"{shown(split)}: notes" if split else "Notes", [*map(shown, said[:SENTENCES_MAX])], note=note)


def _table(split: str, part: Rows, most: int) -> TableBlock:
    columns = [*map(shown, part.columns[:COLUMNS_MAX])]
    num = min(ROWS_MAX, max(0, most) // len(columns))
    notes = [left_out(len(part.columns), COLUMNS_MAX, "column"), left_out(len(part.rows), num, "row")]
    rows = [[_cell(value) for value in row[:COLUMNS_MAX]] for row in part.rows[:num]]
    title = f"{shown(split)}: {columns[0]}"
    return TableBlock(title, columns, rows, "; ".join(filter(None, notes)), "there is no room for it on this page")


def _cell(value: Any) -> Cell:
    return Cell(f"{value:.6g}") if isinstance(value, float) else cell(value)

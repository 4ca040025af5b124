"""The turns of large tables of tests: `make test` runs a part of the cells each day, `make test-long` all of them.

The day is that of the process that starts the suite, for all of its workers. `ATOLL_TEST_DAY=739949` repeats the turns
of a day, `ATOLL_TEST_DAY=all` gives every cell the marker `long`, which is what `make test-long` does.
"""

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest

VARIABLE = "ATOLL_TEST_DAY"

# Set where the suite starts: its workers inherit it, also after midnight.
DAY = os.environ.setdefault(VARIABLE, str(datetime.now(UTC).date().toordinal()))


def is_due(number: int, days: int) -> bool:
    """Return whether a cell has its turn today: each of `days` days a cell with another remainder."""
    return DAY != "all" and (number + int(DAY)) % days == 0


def in_turn(*values: Any, number: int, days: int, id: str | None = None) -> Any:
    """Return the parameters of a cell, `long` unless it has its turn today."""
    return pytest.param(*values, marks=() if is_due(number, days) else pytest.mark.long, id=id)


def table(rows: Iterable[str], columns: Iterable[str], *, days: int) -> list[Any]:
    """Return the cells of a table, of which each row and each column has some a day."""
    names = [*columns]
    return [
        in_turn(row, column, number=place + shift, days=days, id=f"{row}-{column}")
        for place, row in enumerate(rows)
        for shift, column in enumerate(names)
    ]

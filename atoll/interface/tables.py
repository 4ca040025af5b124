"""Rows of plain values, which a notebook shows as a table."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from atoll.ground.printable import count_of
from atoll.interface.errors import AtollError

if TYPE_CHECKING:
    import pandas

SHOWN_MAX = 50
"""The largest number of rows in a notebook's view."""


class Table(Sequence[Mapping[str, Any]]):
    """Rows of plain values by column.

    Args:
        rows: the rows; a row may lack columns.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = tuple(rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns, in the order of their first appearance."""
        return tuple(dict.fromkeys(name for row in self._rows for name in row))

    def column(self, name: str) -> list[Any]:
        """Return the values of a column; None where a row lacks it.

        Raises:
            KeyError: no row has it; the message lists those that there are.
        """
        if name not in self.columns:
            raise KeyError(f"{name!r} (columns: {', '.join(self.columns) or 'none'})")
        return [row.get(name) for row in self._rows]

    def frame(self) -> "pandas.DataFrame":
        """Return the rows as a data frame of pandas.

        Raises:
            AtollError: pandas is not installed; the message names the extra.
        """
        try:
            import pandas
        except ImportError as error:
            raise AtollError("a frame needs pandas, which is not installed: pip install 'atoll[notebook]'") from error
        return pandas.DataFrame([dict(row) for row in self._rows], columns=list(self.columns))

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "Table": ...
    def __getitem__(self, index: int | slice) -> "Mapping[str, Any] | Table":
        """Return a row, or some of the rows as a table."""
        return Table(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows."""
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Table({count_of(len(self), 'row')}: {', '.join(self.columns)})"

    def _repr_html_(self) -> str:
        if not self._rows:
            return "<p>no rows</p>"
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        rows = [
            "<tr>" + "".join(f"<td>{html.escape(_text(row.get(name)))}</td>" for name in self.columns) + "</tr>"
            for row in self._rows[:SHOWN_MAX]
        ]
        more = f"<p>... and {count_of(len(self) - SHOWN_MAX, 'row')} more</p>" if len(self) > SHOWN_MAX else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{more}"


@dataclass(frozen=True)
class Page:
    """Some rows of a long list.

    Args:
        rows: the rows, as plain values, in the order of the list.
        next: the cursor with which the next page is asked for; None: this is the last one.
    """

    rows: Sequence[Mapping[str, Any]]
    next: str | None


def of_sites(part: Mapping[str, Any]) -> Table:
    """Return the curves of a document of `server.views.sites` as a table: site, version, and a column a metric."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for site, metrics in part["curves"].items():
        for metric, points in metrics.items():
            for version, value in points:
                rows.setdefault((site, version), {"site": site, "version": version})[metric] = value
    return Table([rows[key] for key in sorted(rows, key=lambda key: (key[1], key[0]))])


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)

"""Tables as CSV, with a column that names the owner of each row."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from atoll.ground.printable import count_of
from atoll.ground.text_files import NotText, text_of
from examples.datasets.folder import BadData, read_checked
from examples.datasets.owned import FLOAT32_MAX, Owned, by_owner

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null"})
"""The spellings of a missing value, in lower case."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Table(Owned):
    """The rows of every owner: inputs (n, F) float32; targets (n, T) float32, or class labels (n,) int64."""

    features: tuple[str, ...]
    """The columns of the inputs: a column's name, or name=value for each value of a one-hot column."""

    classes: tuple[str, ...] = ()
    """The classes in the order of their labels; empty if the targets are numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The roles of a table's columns; those without another role are inputs."""

    site: str
    """The column that names the owner of a row."""

    target: str | Sequence[str]
    """The column to learn, or several of numbers."""

    drop: Sequence[str] = ()
    """Columns that are left out."""

    categorical: Sequence[str] = ()
    """Columns of numbers that are names, such as postal codes."""

    classes: bool = False
    """Treat the target's numbers as names of classes; texts always are."""

    header: Sequence[str] | None = None
    """The names of all columns, if the file does not begin with them."""

    @property
    def targets(self) -> list[str]:
        """The names of the target columns."""
        return [self.target] if isinstance(self.target, str) else list(self.target)


def read_table(
    path: Path, columns: Columns, *, delimiter: str = ",", test_fraction: float = 0.2, sha256: str | None = None
) -> Table:
    """Read a table whose rows name their owner.

    A column is numeric if its cells are finite numbers, and categorical if none of them is a number, or if it is named
    in `categorical`. A categorical column with the values v1 < v2 < ... (as texts) becomes one column for each, 1 where
    the cell has this value and 0 elsewhere. Nothing is guessed or filled in: a missing value, or a text in a column of
    numbers, is an error.

    Args:
        path: of the file, UTF-8.
        columns: the roles of its columns.
        delimiter: between cells.
        test_fraction: of each owner's rows, the last; as for `by_owner`.
        sha256: of the file; as for `read_checked`.

    Raises:
        NoData: there is no such file.
        BadData: columns that do not exist, a row of another length, a missing value; with row and column.
    """
    cells = _read(path, read_checked(path, sha256), columns.header, delimiter)
    without_inputs = [columns.site, *columns.targets, *columns.drop]
    if missing := [name for name in [*without_inputs, *columns.categorical] if name not in cells.columns]:
        raise BadData(f"{path}: there is no column {', '.join(missing)} (columns: {', '.join(cells.columns)})")
    cells.check_values(except_for=columns.drop)
    input_names = [name for name in cells.columns if name not in without_inputs]
    if not input_names:
        raise BadData(f"{path}: no column is left for the inputs")
    encoded = [_encoded(cells, name, name in columns.categorical) for name in input_names]
    inputs = torch.from_numpy(np.concatenate([values for _, values in encoded], axis=1))
    labels, classes = _targets(cells, columns.targets, columns.classes)
    parts = by_owner([cell.strip() for cell in cells.columns[columns.site]], test_fraction)
    features = tuple(feature for features, _ in encoded for feature in features)
    return Table(TensorDataset(inputs, labels), parts, features, classes)


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of a file."""

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]
    """The line of the file on which each row ends."""

    def check_values(self, except_for: Sequence[str]) -> None:
        """Raise BadData if a cell has no value."""
        columns = [name for name in self.columns if name not in except_for]
        empty = [(name, row) for name in columns for row, cell in enumerate(self.columns[name]) if _is_missing(cell)]
        if empty:
            name, row = min(empty, key=lambda place: place[1])
            more = f" ({count_of(len(empty), 'such cell')} in all)" if len(empty) > 1 else ""
            raise self.fault(name, row, f"has no value{more}")

    def numbers(self, name: str) -> Floats | None:
        """Return (n,) a column as numbers; None if not one cell is a number."""
        values = [_number(cell) for cell in self.columns[name]]
        if all(value is None for value in values):
            return None
        for row, value in enumerate(values):
            if value is None or not math.isfinite(value):
                raise self.fault(name, row, "is no finite number, but others are; name the column in `categorical`")
            if abs(value) > FLOAT32_MAX:
                raise self.fault(name, row, "is more than a float32 holds")
        return np.array(values, np.float32)

    def fault(self, name: str, row: int, what: str) -> BadData:
        """Return the error of a cell."""
        return BadData(f"{self.path}: line {self.lines[row]}, column {name!r}: {self.columns[name][row]!r} {what}")


def _read(path: Path, content: bytes, header: Sequence[str] | None, delimiter: str) -> _Cells:
    try:
        reader = csv.reader(io.StringIO(text_of(content, path), newline=""), delimiter=delimiter, strict=True)
        rows = [(reader.line_num, row) for row in reader if row]
    except NotText as error:
        raise BadData(str(error)) from error
    except csv.Error as error:
        raise BadData(f"{path}: line {reader.line_num}: is no CSV: {error}") from error
    names = [name.strip() for name in (header if header is not None else rows[0][1] if rows else [])]
    rows = rows if header is not None else rows[1:]
    if not rows:
        raise BadData(f"{path}: has no rows")
    if len(set(names)) < len(names) or "" in names:
        raise BadData(f"{path}: names of columns must differ and not be empty, got {', '.join(map(repr, names))}")
    for line, row in rows:
        if len(row) != len(names):
            raise BadData(
                f"{path}: line {line} has {count_of(len(row), 'cell')}, but there are {count_of(len(names), 'column')}"
            )
    return _Cells(path, {name: [row[k] for _, row in rows] for k, name in enumerate(names)}, [line for line, _ in rows])


def _is_missing(cell: str) -> bool:
    return cell.strip().lower() in MISSING


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _encoded(cells: _Cells, name: str, is_categorical: bool) -> tuple[list[str], Floats]:
    """Return the names and the values (n, k) of the inputs that one column becomes."""
    numbers = None if is_categorical else cells.numbers(name)
    if numbers is not None:
        return [name], numbers[:, None]
    values, codes = np.unique([cell.strip() for cell in cells.columns[name]], return_inverse=True)
    return [f"{name}={value}" for value in values], np.eye(len(values), dtype=np.float32)[codes]


def _targets(cells: _Cells, names: Sequence[str], is_class: bool) -> tuple[torch.Tensor, tuple[str, ...]]:
    numbers = [None if is_class else cells.numbers(name) for name in names]
    if (columns := [column for column in numbers if column is not None]) and len(columns) == len(names):
        return torch.from_numpy(np.stack(columns, axis=1)), ()
    if len(names) != 1:
        wrong = (
            ", ".join(name for name, column in zip(names, numbers, strict=True) if column is None) or "none is named"
        )
        raise BadData(f"{cells.path}: targets must be one column of classes, or columns of numbers: {wrong}")
    labels = [cell.strip() for cell in cells.columns[names[0]]]
    texts = sorted(set(labels), key=_as_number_first)
    code = {text: number for number, text in enumerate(texts)}
    return torch.tensor([code[label] for label in labels]), tuple(texts)


def _as_number_first(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text

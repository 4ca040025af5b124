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

from atoll.parallel.data.public.folder import BadData, read_checked
from atoll.parallel.data.public.owned import FLOAT32_MAX, Owned, by_owner

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null"})
"""What stands for a value that is not there, in small letters."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Table(Owned):
    """The rows of every owner: inputs (n, F) float32; targets (n, T) float32, or class labels (n,) int64."""

    features: tuple[str, ...]
    """What the columns of the inputs are: a column's name, or name=value of one that was made one-hot."""

    classes: tuple[str, ...] = ()
    """The classes in the order of their labels; empty when the targets are numbers."""


def read_table(
    path: Path,
    *,
    site: str,
    target: str | Sequence[str],
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    classes: bool = False,
    header: Sequence[str] | None = None,
    delimiter: str = ",",
    test_fraction: float = 0.2,
    sha256: str | None = None,
) -> Table:
    """A table whose rows name their owner.

    A column is numeric when its cells are finite numbers, and categorical when none of them is a number, or when it is
    named in `categorical`. A categorical column with the values v1 < v2 < ... (as texts) becomes one column for each, 1
    where the cell has this value and 0 elsewhere. Nothing is guessed or filled in: a cell without a value, or one that
    is no number in a column of numbers, is an error.

    Args:
        path: the file, UTF-8.
        site: the column that names the owner; it is not among the inputs.
        target: the column to learn, or several of numbers.
        drop: columns that are left out.
        categorical: columns of numbers that are names, such as postal codes.
        classes: whether the target's numbers are names of classes; texts always are.
        header: the names of the columns, where the file does not begin with them.
        delimiter: between cells.
        test_fraction: of each owner's rows, the last; as for `by_owner`.
        sha256: of the file; as for `read_checked`.

    Raises:
        NoData: there is no such file.
        BadData: columns that are not there, a row of another length, a cell without a value; with row and column.
    """
    read = _read(path, read_checked(path, sha256), header, delimiter)
    targets = [target] if isinstance(target, str) else list(target)
    if missing := [name for name in [site, *targets, *drop, *categorical] if name not in read.columns]:
        raise BadData(f"{path}: there is no column {', '.join(missing)} (there: {', '.join(read.columns)})")
    read.check_values(except_for=drop)
    wanted = [name for name in read.columns if name not in {site, *targets, *drop}]
    if not wanted:
        raise BadData(f"{path}: no column is left for the inputs")
    encoded = [_encoded(read, name, name in categorical) for name in wanted]
    inputs = torch.from_numpy(np.concatenate([values for _, values in encoded], axis=1))
    labels, names = _targets(read, targets, classes)
    parts = by_owner([cell.strip() for cell in read.columns[site]], test_fraction)
    return Table(TensorDataset(inputs, labels), parts, tuple(name for those, _ in encoded for name in those), names)


@dataclass(frozen=True, slots=True)
class _Read:
    """The cells of a file."""

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]
    """On which line of the file each row ends."""

    def check_values(self, except_for: Sequence[str]) -> None:
        """Refuse cells without a value."""
        columns = [name for name in self.columns if name not in except_for]
        empty = [(name, row) for name in columns for row, cell in enumerate(self.columns[name]) if _is_missing(cell)]
        if empty:
            name, row = min(empty, key=lambda place: place[1])
            more = f" ({len(empty)} such cells in all)" if len(empty) > 1 else ""
            raise self.fault(name, row, f"has no value{more}")

    def numbers(self, name: str) -> Floats | None:
        """(n,) a column as numbers; None: not one cell is a number."""
        values = [_number(cell) for cell in self.columns[name]]
        if all(value is None for value in values):
            return None
        for row, value in enumerate(values):
            if value is None or not math.isfinite(value):
                raise self.fault(name, row, "is no finite number, and others are; name the column in `categorical`")
            if abs(value) > FLOAT32_MAX:
                raise self.fault(name, row, "is more than a float32 holds")
        return np.array(values, np.float32)

    def fault(self, name: str, row: int, what: str) -> BadData:
        """What is wrong with a cell."""
        return BadData(f"{self.path}: line {self.lines[row]}, column {name!r}: {self.columns[name][row]!r} {what}")


def _read(path: Path, content: bytes, header: Sequence[str] | None, delimiter: str) -> _Read:
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), delimiter=delimiter, strict=True)
        rows = [(reader.line_num, row) for row in reader if row]
    except UnicodeDecodeError as error:
        raise BadData(f"{path}: is no UTF-8 text: {error}") from error
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
            raise BadData(f"{path}: line {line} has {len(row)} cells, and there are {len(names)} columns")
    return _Read(path, {name: [row[k] for _, row in rows] for k, name in enumerate(names)}, [line for line, _ in rows])


def _is_missing(cell: str) -> bool:
    return cell.strip().lower() in MISSING


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _encoded(read: _Read, name: str, is_categorical: bool) -> tuple[list[str], Floats]:
    """The names and the values (n, k) of the inputs that one column becomes."""
    numbers = None if is_categorical else read.numbers(name)
    if numbers is not None:
        return [name], numbers[:, None]
    values, codes = np.unique([cell.strip() for cell in read.columns[name]], return_inverse=True)
    return [f"{name}={value}" for value in values], np.eye(len(values), dtype=np.float32)[codes]


def _targets(read: _Read, names: Sequence[str], is_class: bool) -> tuple[torch.Tensor, tuple[str, ...]]:
    numbers = [None if is_class else read.numbers(name) for name in names]
    if (columns := [column for column in numbers if column is not None]) and len(columns) == len(names):
        return torch.from_numpy(np.stack(columns, axis=1)), ()
    if len(names) != 1:
        wrong = (
            ", ".join(name for name, column in zip(names, numbers, strict=True) if column is None) or "none is named"
        )
        raise BadData(f"{read.path}: targets must be one column of classes, or columns of numbers: {wrong}")
    cells = [cell.strip() for cell in read.columns[names[0]]]
    texts = sorted(set(cells), key=_as_number_first)
    code = {text: number for number, text in enumerate(texts)}
    return torch.tensor([code[cell] for cell in cells]), tuple(texts)


def _as_number_first(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text

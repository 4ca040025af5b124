"""Readers of the two trace files: CSV with a header and no empty cells; each fault is reported with line and column.

    devices    client,examples_per_s,down_mbps,up_mbps,latency_ms     one line for each client
    devices    weight,examples_per_s,down_mbps,up_mbps,latency_ms     one line for each kind of device
    awake      client,from_s,to_s[,period_s]                          one line for each interval

Megabits are 10^6 bits. `from_s` and `to_s` count from the start of the run; with a period they repeat.
"""

import csv
import io
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.ground.folders import in_words
from atoll.ground.printable import count_of
from atoll.ground.text_files import NotText, text_of
from atoll.protocol.settings import ConfigError
from atoll.simulations.devices.availability import Availability, edges_of
from atoll.simulations.devices.fleet import Speeds

SPEEDS = ("examples_per_s", "down_mbps", "up_mbps", "latency_ms")
BYTES_PER_S = 125_000.0
"""Bytes per second of one megabit per second."""

FAULTS_MAX = 20
"""Maximum number of faulty lines that are listed; the others are counted."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column and the condition on its cells."""

    name: str
    allowed: str = ""
    is_allowed: Callable[[float], bool] = lambda _: True

    def fault(self, text: str) -> str | None:
        """Return the fault of a cell; None: it has none."""
        if not text:
            return f"column {self.name}: is empty; allowed: {self.allowed or 'a name'}"
        if not self.allowed:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and self.is_allowed(value):
            return None
        return f"column {self.name}: got {text!r}; allowed: {self.allowed}"


CLIENT = Column("client")
WEIGHT = Column("weight", "a number > 0", lambda value: value > 0)
SPEED_COLUMNS = (
    *(Column(name, "a number > 0", lambda value: value > 0) for name in SPEEDS[:3]),
    Column("latency_ms", "a number >= 0", lambda value: value >= 0),
)
INTERVAL_COLUMNS = (
    CLIENT,
    Column("from_s", "a number >= 0", lambda value: value >= 0),
    Column("to_s", "a number > 0", lambda value: value > 0),
)
PERIOD = Column("period_s", "a number > 0", lambda value: value > 0)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file."""

    number: int
    client: str
    """Name of the client; empty: the file has no such column."""
    values: dict[str, float]
    """Numbers by the names of their columns; empty if a cell is at fault."""


Fault = tuple[int, str]
"""A line number and its fault; line 0 stands for the whole file."""


@dataclass(frozen=True, slots=True)
class Table:
    """Parsed trace file: its lines, and the faults of its cells."""

    columns: tuple[Column, ...]
    lines: list[Line]
    faults: list[Fault]
    """Faults of cells."""


def read_speeds(path: Path, names: Sequence[str], kinds: NDArray[np.float64]) -> Speeds:
    """Read the speeds of all clients (clients,): each client's line, or the line of a kind of device, drawn by weight.

    Args:
        path: the path of the file.
        names: the names of the clients.
        kinds: a draw in (0, 1) for each client (clients,), which selects its kind.

    Raises:
        ConfigError: all faults of the file, and the clients that it lacks.
    """
    table = _table(path, (CLIENT, *SPEED_COLUMNS), (WEIGHT, *SPEED_COLUMNS))
    lines, by_name = table.lines, {line.client: line for line in table.lines}
    has_kinds = WEIGHT in table.columns
    _refuse(path, [*table.faults, *([] if has_kinds else [*_repeated(lines), *_missing(names, by_name)])])
    if has_kinds:
        shares = np.cumsum([line.values["weight"] for line in lines])
        of_client = [lines[at] for at in np.searchsorted(shares, kinds * shares[-1], side="right").tolist()]
    else:
        of_client = [by_name[name] for name in names]
    compute, down, up, latency = (np.array([line.values[name] for line in of_client]) for name in SPEEDS)
    return Speeds(compute, down * BYTES_PER_S, up * BYTES_PER_S, latency / 1000)


def read_availability(path: Path, names: Sequence[str]) -> Availability:
    """Read the intervals in which each client is awake.

    Raises:
        ConfigError: all faults of the file, and the clients that it lacks.
    """
    table = _table(path, INTERVAL_COLUMNS, (*INTERVAL_COLUMNS, PERIOD))
    by_name: dict[str, list[Line]] = {line.client: [] for line in table.lines}
    for line in table.lines:
        if line.values:
            by_name[line.client].append(line)
    for intervals in by_name.values():
        intervals.sort(key=lambda line: line.values["from_s"])
    overlaps = [fault for intervals in by_name.values() if intervals for fault in _faults_of_intervals(intervals)]
    _refuse(path, [*table.faults, *overlaps, *_missing(names, by_name)])
    periods = [by_name[name][0].values.get("period_s", math.inf) for name in names]
    edges = [
        edges_of([(line.values["from_s"], line.values["to_s"]) for line in by_name[name]], period)
        for name, period in zip(names, periods, strict=True)
    ]
    return Availability.of(edges, periods)


def _faults_of_intervals(lines: list[Line]) -> Iterator[Fault]:
    """Yield the faults of one client's intervals, which are sorted by their beginnings."""
    period = lines[0].values.get("period_s", math.inf)
    before: Line | None = None
    for line in lines:
        begin, end = line.values["from_s"], line.values["to_s"]
        if begin >= end:
            yield line.number, f"column to_s: got {end:g}; allowed: a number > from_s ({begin:g})"
        if line.values.get("period_s", math.inf) != period:
            got = line.values["period_s"]
            yield line.number, f"column period_s: got {got:g}; allowed: {period:g}, as on line {lines[0].number}"
        if end > period:
            yield line.number, f"column to_s: got {end:g}; allowed: a number <= period_s ({period:g})"
        if before is not None and begin < before.values["to_s"]:
            ends = f"{line.client!r} is awake until {before.values['to_s']:g} by line {before.number}"
            yield line.number, f"column from_s: got {begin:g}, which overlaps: {ends}"
        before = line


def _repeated(lines: Iterable[Line]) -> Iterator[Fault]:
    seen: dict[str, int] = {}
    for line in lines:
        if line.client and line.client in seen:
            yield line.number, f"column client: {line.client!r} stands on line {seen[line.client]} already"
        seen.setdefault(line.client, line.number)


def _missing(names: Sequence[str], known: Collection[str]) -> Iterator[Fault]:
    absent = [name for name in names if name not in known]
    if absent:
        some = ", ".join(map(repr, absent[:5])) + (", ..." if len(absent) > 5 else "")
        yield 0, f"no line for {len(absent)} of {count_of(len(names), 'client')}: {some}"


# ---------------------------------------------------------------- the file


def _table(path: Path, *headers: tuple[Column, ...]) -> Table:
    """Read the lines of a file that has one of these headers, in any order of its columns."""
    try:
        file = io.StringIO(text_of(path.read_bytes(), path), newline="")
        rows = [(reader.line_num, row) for reader in [csv.reader(file)] for row in reader if row]
    except NotText as error:
        raise ConfigError([str(error)]) from error
    except OSError as error:
        raise ConfigError([in_words(error)]) from error
    except csv.Error as error:
        raise ConfigError([f"{path}: is not CSV: {error}"]) from error
    names = [name.strip() for name in rows[0][1]] if rows else []
    columns = next((columns for columns in headers if sorted(c.name for c in columns) == sorted(names)), None)
    if columns is None:
        _refuse(path, [(1, _fault_of_header(names, headers))])
        raise AssertionError
    if len(rows) == 1:
        _refuse(path, [(2, "is missing; allowed: at least one line below the header")])
    places = [(names.index(column.name), column) for column in columns]
    faults: list[Fault] = []
    lines: list[Line] = []
    for number, row in rows[1:]:
        cells = [cell.strip() for cell in row]
        client = next((cells[at] for at, column in places if column is CLIENT and at < len(cells)), "")
        if len(cells) != len(names):
            wrong = [f"has {count_of(len(cells), 'cell')}; allowed: {len(names)}, as the header"]
        else:
            wrong = [fault for at, column in places if (fault := column.fault(cells[at])) is not None]
        values = {} if wrong else {column.name: float(cells[at]) for at, column in places if column.allowed}
        lines.append(Line(number, client, values))
        faults += [(number, fault) for fault in wrong]
    return Table(columns, lines, faults)


def _fault_of_header(names: list[str], headers: Sequence[tuple[Column, ...]]) -> str:
    allowed = " or ".join(",".join(column.name for column in columns) for columns in headers)
    known = {column.name for columns in headers for column in columns}
    unknown = [name for name in names if name not in known]
    fault = f"unknown column {', '.join(map(repr, unknown))}" if unknown else f"got {','.join(names)!r}"
    return f"{fault}; allowed: {allowed}"


def _refuse(path: Path, faults: Collection[Fault]) -> None:
    """Raise ConfigError if there are faults: first of lines in their order, then of the whole file."""
    by_line = sorted((fault for fault in faults if fault[0]), key=lambda fault: fault[0])
    texts = [f"{path}: line {number}, {text}" for number, text in by_line[:FAULTS_MAX]]
    if len(by_line) > FAULTS_MAX:
        texts.append(f"{path}: and {count_of(len(by_line) - FAULTS_MAX, 'more fault')}")
    texts += [f"{path}: {text}" for number, text in faults if not number]
    if texts:
        raise ConfigError(texts)

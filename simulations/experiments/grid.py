"""The grid of a sweep: a run's settings, and those that vary in the table `[grid]`. Every combination is a cell.

    task = "digits.py:task"
    rounds = 50

    [grid]
    "round.deadline" = [30, 60]
    seed = [1, 2, 3]

    [[grid.rule]]                         # a group: settings that change together; the key is its column
    name = "mean"
    [[grid.rule]]
    name = "trimmed mean"
    aggregation = {rule = "trimmed_mean", malicious = 4}

    [sweep]
    target = 0.9

This example has 2 x 3 x 2 cells. The identity of a cell is the digest of all its settings, so a change of the base
makes new cells.
"""

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from atoll.ground.folders import in_words
from atoll.ground.text_files import NotText, text_of
from atoll.protocol.settings import STRICT, ConfigError, load_text, short
from atoll.simulations.federation.config import OF_A_COORDINATOR

Settings = Mapping[str, Any]
"""Plain values, or lists of them, by dotted key."""

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_KEY_MAX = 200
_ODD = re.compile(r"[^A-Za-z0-9._=+-]+")


class SweepConfig(BaseModel, **STRICT):
    """Table `[sweep]`: the metric and columns of the table of results, and the number of parallel runs."""

    metric: str | None = None
    """Metric of the table, WHO/METRIC such as "server/accuracy"; absent: the first one that is not a loss."""

    target: Annotated[float, Field(strict=False, allow_inf_nan=False)] | None = None
    """Target of the metric, for columns with the rounds, time and bytes to reach it; absent: no such columns."""

    columns: list[str] | None = None
    """Columns of the table, beside the varied settings; absent: the default ones."""

    over: list[str] = ["seed"]
    """Varied settings that are averaged over, so that a row shows mean and standard deviation."""

    jobs: int = Field(default=1, ge=1, le=1024)
    """Number of parallel runs, each in a process."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep."""

    varied: Mapping[str, str]
    """Labels of the varied settings, by column."""
    settings: Settings
    """All settings except the task, including the base's."""
    task: str

    @property
    def name(self) -> str:
        """Varied settings in words, such as "deadline 30, seed 1"."""
        return ", ".join(f"{column.rpartition('.')[2]} {value}" for column, value in self.varied.items())

    @property
    def digest(self) -> str:
        """The digest of the task and all settings."""
        text = json.dumps([self.task, sorted(self.settings.items())], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        """The name of the cell's folder, readable and unique."""
        readable = "_".join(f"{column.rpartition('.')[2]}={value}" for column, value in self.varied.items())
        return f"{_ODD.sub('-', readable)[:80]}-{self.digest}"

    def without(self, columns: list[str]) -> tuple[tuple[str, str], ...]:
        """Return the labels of all other columns, which are equal for cells that are averaged."""
        return tuple((column, value) for column, value in self.varied.items() if column not in columns)


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells of a sweep, in the order of the file, in which the last column changes fastest."""

    cells: tuple[Cell, ...]
    sweep: SweepConfig
    folder: Path
    """Folder of the file, to which paths in the settings are relative."""
    unused: Settings = field(default_factory=dict)
    """Settings of the file's coordinator table that a simulation does not use; no cell has them."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the varied settings."""
        return tuple(self.cells[0].varied)


def read_grid(path: Path, overrides: Sequence[str] = ()) -> Grid:
    """Read the grid of a sweep's TOML file.

    Args:
        path: the path of the file.
        overrides: `key=value` overrides of the base.

    Raises:
        ConfigError: the file cannot be read, or its grid is not valid; the message lists all faults.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError([in_words(error)]) from error
    return parse_grid(data, path, overrides)


def parse_grid(data: bytes, path: Path, overrides: Sequence[str] = ()) -> Grid:
    """Parse the grid of a sweep's TOML; `path` is its origin, for messages.

    Raises:
        ConfigError: the bytes are not TOML, or the grid is not valid; the message lists all faults.
    """
    try:
        text = text_of(data, path)
        document = tomllib.loads(text)
    except NotText as error:
        raise ConfigError([str(error)]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: not TOML: {error}"]) from error
    faults: list[str] = []
    grid = document.pop("grid", None)
    document.pop("sweep", None)
    task = document.pop("task", None)
    if not isinstance(task, str):
        faults.append("task: missing; allowed: `module:attribute` or `path/to/file.py:attribute`")
    given = dict(_flat(document, faults))
    unused = {key: value for key, value in given.items() if _is_of_a_coordinator(key)}
    base = {key: value for key, value in given.items() if key not in unused}
    axes = _axes(grid, faults)
    base |= _overridden(
        overrides, {key for choices in axes.values() for _, settings in choices for key in settings}, faults
    )
    config = _sweep(text, faults)
    faults += _faults_of_over(config, axes)
    if faults:
        raise ConfigError([f"{path}: {fault}" for fault in faults])
    cells = []
    for choice in itertools.product(*axes.values()):
        settings = dict(base)
        for _, values in choice:
            settings |= values
        varied = {column: label for column, (label, _) in zip(axes, choice, strict=True)}
        cells.append(Cell(varied, settings, str(task)))
    return Grid(tuple(cells), config, path.parent.resolve(), unused)


def _is_of_a_coordinator(key: str) -> bool:
    return key.startswith("coordinator.") and key not in OF_A_COORDINATOR


def _flat(table: Mapping[str, Any], faults: list[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested tables by dotted keys; a quoted "a.b" means b of the table a."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if not _is_key(key):
            faults.append(f"{short(key)}: is not a key; allowed: names joined by dots, such as round.deadline")
        elif isinstance(value, Mapping):
            yield from _flat(value, faults, f"{key}.")
        elif not _is_setting(value):
            faults.append(f"{key}: got {short(value)}; allowed: a value or a list of values")
        else:
            yield key, value


def _is_key(key: str) -> bool:
    return len(key) <= _KEY_MAX and _KEY.fullmatch(key) is not None


def _is_setting(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list) else _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a string, a boolean or a number of limited size; dates are not."""
    return isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**64)


Choice = tuple[str, dict[str, Any]]
"""Label of one choice of a column, and its settings."""


def _axes(grid: Any, faults: list[str]) -> dict[str, list[Choice]]:
    """Return the values that each column of the grid takes."""
    if not isinstance(grid, Mapping) or not grid:
        faults.append('grid: missing; allowed: a table of lists, such as "round.deadline" = [30, 60]')
        return {}
    axes = {column: _choices(column, values, faults) for column, values in _lists(grid)}
    owner: dict[str, str] = {}
    for column, choices in axes.items():
        for key in sorted({key for _, settings in choices for key in settings}):
            if key in owner:
                faults.append(f"grid.{column}: {key} is varied by {owner[key]} already")
            owner[key] = column
    return axes


def _lists(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and len(prefix) <= _KEY_MAX:
            yield from _lists(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _choices(column: str, values: Any, faults: list[str]) -> list[Choice]:
    if not isinstance(values, list) or not values:
        faults.append(f"grid.{column}: got {short(values)}; allowed: a list of values, or of tables of settings")
        return []
    if any(isinstance(value, Mapping) != isinstance(values[0], Mapping) for value in values):
        faults.append(f"grid.{column}: mixes values and tables; allowed: one of the two")
        return []
    if isinstance(values[0], Mapping):
        choices = [_group(value, faults) for value in values]
    else:
        if not _is_key(column):
            faults.append(f"grid.{column}: is not a key; allowed: names joined by dots, such as round.deadline")
        if odd := [value for value in values if not _is_setting(value)]:
            faults.append(f"grid.{column}: got {short(odd[0])}; allowed: values, or lists of values")
            return []
        choices = [(_label(value), {column: value}) for value in values]
    labels = [label for label, _ in choices]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        faults.append(f"grid.{column}: has {', '.join(twice)} twice")
    return choices


def _group(table: Mapping[str, Any], faults: list[str]) -> Choice:
    settings = dict(_flat({key: value for key, value in table.items() if key != "name"}, faults))
    name = table.get("name", " ".join(f"{key.rpartition('.')[2]}={_label(value)}" for key, value in settings.items()))
    if not _is_plain(name):
        faults.append(f"grid: name: got {short(name)}; allowed: a string")
        name = ""
    return str(name), settings


def _label(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _overridden(overrides: Sequence[str], varied: Collection[str], faults: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals or not _is_key(key):
            faults.append(f"--set: got {override!r}; allowed: key=value, with a key such as round.quorum")
        elif key in varied:
            faults.append(f"--set: {key} is varied by the grid")
        else:
            value = _toml_or_text(text)
            if not _is_setting(value):
                faults.append(f"--set: {key}: got {short(value)}; allowed: a value or a list of values")
            settings[key] = value
    return settings


def _toml_or_text(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _faults_of_over(config: SweepConfig, columns: Collection[str]) -> Iterator[str]:
    """Yield the columns of `over` that do not vary; only the seed need not vary."""
    for name in config.over:
        if name != "seed" and name not in columns:
            varied = ", ".join(dict.fromkeys([*columns, "seed"]))
            yield f"sweep.over: got {short(name)}; allowed: varied settings: {varied}"


class _SweepAlone(BaseModel):
    """Table `[sweep]` of a TOML file, without the other tables."""

    model_config = STRICT | ConfigDict(extra="ignore")
    sweep: SweepConfig = SweepConfig()


def _sweep(text: str, faults: list[str]) -> SweepConfig:
    try:
        return load_text(_SweepAlone, text, name="").sweep
    except ConfigError as error:
        faults += error.faults
        return SweepConfig()

"""The report on a simulated run from the files of its folder: curves, targets, participation, fairness. Without torch.

A metric's name is WHO/METRIC: `server/accuracy` on the server's test data, `clients/accuracy` on the clients',
`train/loss` of the training. If the log contains a round twice, because an interrupted run was resumed from an earlier
round, the last line counts.
"""

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from atoll.ground.faults import Refused
from atoll.simulations.federation.seal import faults_of_seal
from atoll.task.metrics import is_loss

Axis = Literal["round", "updates", "virtual_s", "real_s", "bytes", "bytes_up"]
"""Horizontal axis of a curve: rounds, counted updates, seconds of virtual or real time, bytes transferred (both ways,
or up)."""

ROUNDS, RESULT, SETTINGS, POPULATION = "rounds.jsonl", "result.json", "run.toml", "population.json"
GROUPS = ("server", "clients", "train", "honest_clients", "honest_train")
FATES = ("invited", "reported", "late", "counted", "lost", "failed", "refused", "stragglers", "released")
AXES = ("virtual_s", "real_s", "bytes_up", "bytes_down")
NUMBERS = ("version", "opened_s", "round_s", "epsilon", *FATES)
TABLES = (*GROUPS, "fates", "steps", "client_values", "train_values")
"""Groups of metrics, and the fields of a round: numbers, numbers that may be absent, and tables that may be."""


class NoReport(Refused):
    """Error: a folder has no files of a simulated run."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Round in which a target was first reached, with time and bytes until then."""

    round: int
    virtual_s: float
    real_s: float
    bytes: int
    """Bytes transferred both ways."""
    bytes_up: int
    updates: int
    """Updates counted in versions."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """Distribution of a metric over the clients, on their data, for the last version that they measured."""

    values: tuple[float, ...]
    """Values of the clients, smallest first."""

    @property
    def mean(self) -> float:
        """The mean, in which all clients have the same weight."""
        return sum(self.values) / len(self.values)

    @property
    def variance(self) -> float:
        """The variance with 1/n, as in Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020."""
        return sum((value - self.mean) ** 2 for value in self.values) / len(self.values)

    def percentile(self, share: float) -> float:
        """Compute a percentile with linear interpolation, as numpy; 0.1: the best value of the worst tenth."""
        at = share * (len(self.values) - 1)
        below = int(at)
        above = min(below + 1, len(self.values) - 1)
        return self.values[below] + (at - below) * (self.values[above] - self.values[below])


@dataclass(frozen=True)
class RunReport:
    """Report on one run."""

    name: str
    """Name of the run in tables and legends."""
    folder: Path
    settings: Mapping[str, Any]
    """Resolved settings, as nested tables; empty if the folder has none."""
    rounds: tuple[Mapping[str, Any], ...]
    """Lines of the log, by number of the round."""
    result: Mapping[str, Any]
    """Result of the run; empty while it runs."""
    population: Mapping[str, Any]
    """Report on the population; empty if the folder has none."""

    @property
    def is_finished(self) -> bool:
        """Return whether the run has finished, without interruption or failure."""
        return self.result.get("state") == "finished"

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Every WHO/METRIC that some round has, the server's first."""
        names = {f"{group}/{name}": None for group in GROUPS for line in self.rounds for name in line.get(group) or {}}
        return tuple(names)

    def curve(self, metric: str, over: Axis = "round") -> tuple[list[float], list[float]]:
        """Return the points at which a metric was measured, and its values there."""
        points = [(at[over], value) for at, value in self._measured(metric)]
        return [x for x, _ in points], [y for _, y in points]

    def last(self, metric: str) -> float | None:
        """Return the newest value of a metric; None: it was never measured."""
        values = self.curve(metric)[1]
        return values[-1] if values else None

    def best(self, metric: str) -> float | None:
        """Return the best value of a metric: the smallest of a loss, the largest of any other."""
        values = self.curve(metric)[1]
        return (min if is_loss(metric) else max)(values) if values else None

    def reached(self, metric: str, target: float) -> Reached | None:
        """Return the first measurement that is at least as good as the target; None: there is none."""
        for at, value in self._measured(metric):
            if value <= target if is_loss(metric) else value >= target:
                return Reached(**{name: at[name] for name in Reached.__dataclass_fields__})
        return None

    def participation(self, fate: str) -> list[int]:
        """Return the number of clients of a fate in each round.

        Args:
            fate: `invited`, `reported`, `stragglers`, `lost`, `failed`, `refused` or `released`; `counted`: clients
                whose updates are in the model; `late`: those from earlier rounds.
        """
        return [line.get(fate) or 0 for line in self.rounds]

    def fairness(self, name: str) -> Fairness | None:
        """Return the distribution of a metric of the clients, such as `accuracy` or `clients/accuracy`.

        None: the clients have measured nothing.

        Raises:
            ValueError: the metric is of another group, or the clients have measured only others; the message lists
                these.
        """
        group, _, name = name.rpartition("/")
        if group not in ("", "clients"):
            raise ValueError(f"fairness: got {group}/{name}; allowed: a metric of the clients, clients/{name}")
        if (found := self.over_clients(name)) is not None:
            return found
        of_lines = [line.get("client_values") or {} for line in self.rounds]
        known = {each for of_clients in of_lines for of_one in of_clients.values() for each in of_one}
        if known and name not in known:
            raise ValueError(f"fairness: got {name!r}; allowed: {', '.join(sorted(known))}")
        return None

    def over_clients(self, name: str) -> Fairness | None:
        """Return the distribution of a metric over the clients; None: they have not measured it."""
        for line in reversed(self.rounds):
            measured = (line.get("client_values") or {}).values()
            if values := sorted(one[name] for one in measured if one.get(name) is not None):
                return Fairness(tuple(values))
        return None

    @property
    def epsilon(self) -> float | None:
        """The epsilon that the most used client has spent; None: the run has no privacy. It is no guarantee."""
        spent = [line["epsilon"] for line in self.rounds if line.get("epsilon") is not None]
        return spent[-1] if spent else None

    @property
    def bytes(self) -> int:
        """The number of bytes transferred since the beginning of the run, both ways."""
        return int(self.rounds[-1]["bytes_up"] + self.rounds[-1]["bytes_down"]) if self.rounds else 0

    @property
    def updates(self) -> int:
        """The number of updates that the versions of the run count."""
        return sum(self.participation("counted"))

    @property
    def num_clients(self) -> int:
        """The number of clients in the population; without a population, in the largest round."""
        if self.population:
            return len(self.population["clients"])
        configured = self.settings.get("population", {}).get("clients")
        return configured or max(self.participation("invited"), default=0)

    def _measured(self, metric: str) -> Iterator[tuple[dict[str, Any], float]]:
        group, _, name = metric.partition("/")
        updates = 0
        for line in self.rounds:
            updates += line.get("counted") or 0
            if (value := (line.get(group) or {}).get(name)) is not None:
                at = {axis: line[axis] for axis in ("round", "virtual_s", "real_s", "bytes_up")}
                yield at | {"bytes": line["bytes_up"] + line["bytes_down"], "updates": updates}, value


def read_run(folder: Path, name: str | None = None) -> RunReport:
    """Read the run in a folder, also while it is running.

    Args:
        folder: the folder of `atoll simulate --out`.
        name: the name in tables and legends; None: the folder's name.

    Raises:
        NoReport: there is no log of rounds, or a file is damaged; the message names the place.
    """
    if faults := faults_of_seal(folder):
        raise NoReport(*faults)
    return RunReport(
        name=name or folder.name,
        folder=folder,
        settings=_read(folder / SETTINGS, lambda content: tomllib.loads(content.decode())),
        rounds=_read_rounds(folder),
        result=_read(folder / RESULT, json.loads),
        population=_read(folder / POPULATION, json.loads),
    )


def _read_rounds(folder: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the lines of the log, by number of the round; raises NoReport."""
    path, found = folder / ROUNDS, dict[int, Mapping[str, Any]]()
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError as error:
        raise NoReport(
            f"{folder}: has no {ROUNDS}; allowed: a folder that `atoll simulate --out` has written"
        ) from error
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            _check_line(line)
            found[line["round"]] = line
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines) and not text.endswith(b"\n"):
                break  # the line is incomplete: it is being written, or the process died meanwhile
            raise NoReport(f"{path}, line {number}: is not a round: {error}") from error
    return tuple(found[number] for number in sorted(found))


def _check_line(line: Any) -> None:
    """Check the types in a line of the log: another program, or a person, may have written it.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: it is no round.
    """
    if type(line["round"]) is not int or type(line["state"]) is not str:
        raise ValueError(f"round, state: got {str(line['round'])[:40]!r}, {str(line['state'])[:40]!r}")
    for name in AXES:
        if line[name] is None:
            raise ValueError(f"{name}: got none")
    for name in (*AXES, *NUMBERS):
        if (number := line.get(name)) is not None and not math.isfinite(number):
            raise ValueError(f"{name}: got {number}")
    for name in TABLES:
        if not isinstance(line.get(name) or {}, dict):
            raise TypeError(f"{name}: got {str(line[name])[:40]!r}")
    for name, kind in {"client_values": dict, "train_values": dict, "fates": str}.items():
        if not all(isinstance(value, kind) for value in (line.get(name) or {}).values()):
            raise TypeError(f"{name}: got other values than a {kind.__name__}")


def _read(path: Path, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    """Return the table in a file; empty: there is no file. Raises NoReport."""
    if not path.exists():
        return {}
    try:
        found = parse(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise NoReport(f"{path}: is damaged, or being written: {error}") from error
    if not isinstance(found, dict):
        raise NoReport(f"{path}: is damaged: it has no table")
    return found

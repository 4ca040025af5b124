"""A simulated run as its folder tells it: curves, targets, participation, fairness. Without torch.

A metric's name is WHO/METRIC: `server/accuracy` of the server's test data, `clients/accuracy` of the clients' own,
`train/loss` of the training. A round that stands in the log twice, because a run was interrupted and went on from the
last committed one, counts as it stands there last.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

Axis = Literal["round", "virtual_s", "real_s", "bytes", "bytes_up"]
"""What a curve is drawn over: rounds, seconds of virtual or real time, bytes moved (both ways, or up) so far."""

ROUNDS, RESULT, SETTINGS, POPULATION = "rounds.jsonl", "result.json", "run.toml", "population.json"
GROUPS = ("server", "clients", "train")


class NoReport(ValueError):
    """The folder is no simulated run's."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a target was first reached."""

    round: int
    virtual_s: float
    real_s: float
    bytes: int
    """Moved until then, both ways."""
    bytes_up: int


@dataclass(frozen=True, slots=True)
class Fairness:
    """How a metric of the clients' own data spreads over the clients, under the last version that they measured."""

    values: tuple[float, ...]
    """One for each client, smallest first."""

    @property
    def mean(self) -> float:
        """Each client counts alike."""
        return sum(self.values) / len(self.values)

    @property
    def variance(self) -> float:
        """Over 1/n, as in Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020."""
        return sum((value - self.mean) ** 2 for value in self.values) / len(self.values)

    def percentile(self, share: float) -> float:
        """Linearly between the two values around it, as numpy does; 0.1: of the worst tenth the best."""
        at = share * (len(self.values) - 1)
        below = int(at)
        above = min(below + 1, len(self.values) - 1)
        return self.values[below] + (at - below) * (self.values[above] - self.values[below])


@dataclass(frozen=True)
class RunReport:
    """One run."""

    name: str
    """What it is called in tables and legends."""
    folder: Path
    settings: Mapping[str, Any]
    """The resolved settings, as nested tables; empty if the folder has none."""
    rounds: tuple[Mapping[str, Any], ...]
    """As they stand in the log, by number."""
    result: Mapping[str, Any]
    """Empty while the run is not over."""
    population: Mapping[str, Any]
    """Empty if the folder has none."""

    @property
    def is_finished(self) -> bool:
        """Whether it has come to its end, and is neither interrupted nor failed."""
        return self.result.get("state") == "finished"

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Every WHO/METRIC that some round has, the server's first."""
        found = {f"{group}/{name}": None for group in GROUPS for line in self.rounds for name in line.get(group) or {}}
        return tuple(found)

    def curve(self, metric: str, over: Axis = "round") -> tuple[list[float], list[float]]:
        """Where the metric was measured, and what it was."""
        points = [(at[over], value) for at, value in self._measured(metric)]
        return [x for x, _ in points], [y for _, y in points]

    def last(self, metric: str) -> float | None:
        """The newest value; None where it was never measured."""
        values = self.curve(metric)[1]
        return values[-1] if values else None

    def best(self, metric: str) -> float | None:
        """The best value: the smallest of a loss, the largest of others."""
        values = self.curve(metric)[1]
        return (min if is_loss(metric) else max)(values) if values else None

    def reached(self, metric: str, target: float) -> Reached | None:
        """The first measurement that is at least as good as the target; None: there was none."""
        for at, value in self._measured(metric):
            if value <= target if is_loss(metric) else value >= target:
                return Reached(**{name: at[name] for name in Reached.__dataclass_fields__})
        return None

    def participation(self, fate: str) -> list[int]:
        """Of each round, how many clients were `invited`, `reported`, `stragglers`, `lost`, `failed`, `refused` or
        `released`; `counted` are those in the model, `late` of them from rounds before."""
        return [line.get(fate) or 0 for line in self.rounds]

    def fairness(self, name: str) -> Fairness | None:
        """Of a metric of the clients, such as `accuracy`; None where they have not measured it."""
        for line in reversed(self.rounds):
            measured = (line.get("client_values") or {}).values()
            if values := sorted(one[name] for one in measured if one.get(name) is not None):
                return Fairness(tuple(values))
        return None

    @property
    def bytes(self) -> int:
        """Moved since the run's begin, both ways."""
        return int(self.rounds[-1]["bytes_up"] + self.rounds[-1]["bytes_down"]) if self.rounds else 0

    @property
    def num_clients(self) -> int:
        """Of the federation, as its population says; without one, of the largest round."""
        if self.population:
            return len(self.population["clients"])
        wanted = self.settings.get("population", {}).get("clients")
        return wanted or max(self.participation("invited"), default=0)

    def _measured(self, metric: str) -> Iterator[tuple[dict[str, Any], float]]:
        group, _, name = metric.partition("/")
        for line in self.rounds:
            if (value := (line.get(group) or {}).get(name)) is not None:
                at = {axis: line[axis] for axis in ("round", "virtual_s", "real_s", "bytes_up")}
                yield at | {"bytes": line["bytes_up"] + line["bytes_down"]}, value


def is_loss(metric: str) -> bool:
    """Whether smaller is better: of a loss, an error or a perplexity."""
    name = metric.rpartition("/")[2].lower()
    return any(word in name for word in ("loss", "error", "perplexity", "mse", "mae"))


def read_run(folder: Path, name: str | None = None) -> RunReport:
    """The run that a folder holds, also while it is going on.

    Args:
        folder: what `atoll simulate --out` was given.
        name: for tables and legends; None: the folder's.

    Raises:
        NoReport: there is no log of rounds, or a line of it is none; the message names the place.
    """
    path = folder / ROUNDS
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
    except FileNotFoundError as error:
        raise NoReport(f"{folder}: has no {ROUNDS}; a run's folder is what `atoll simulate --out` was given") from error
    rounds = {}
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            rounds[line["round"]] = line
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not text.endswith("\n"):
                break  # it is being written, or the process died as it was
            raise NoReport(f"{path}, line {number}: is no round: {error}") from error
    settings = folder / SETTINGS
    return RunReport(
        name=name or folder.name,
        folder=folder,
        settings=tomllib.loads(settings.read_text("utf-8")) if settings.exists() else {},
        rounds=tuple(rounds[number] for number in sorted(rounds)),
        result=_read_json(folder / RESULT),
        population=_read_json(folder / POPULATION),
    )


def _read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found

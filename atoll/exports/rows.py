"""The rows of an export: numbers of a run that were known at one instant, and what describes the run. Pure.

A row is written whole, once, and never changes: so a source yields only what is final.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Axis = Literal["round", "version", "step"]
"""The quantity that a row's step counts: rounds, versions of the model, or optimizer steps."""

BY_CLIENT = frozenset(
    {
        "fates",
        "failures",
        "refusals",
        "losses",
        "steps",
        "capped",
        "carried",
        "malicious",
        "client_values",
        "train_values",
        "not_finite",
        "buffer",
    }
)
"""The entries of a round's line that list clients."""

WITHOUT_NUMBERS = BY_CLIENT | {"round", "version", "too_old"}
"""The entries of a round's line that are no numbers of the whole round."""

GROUPS = ("server", "clients", "train")
OF_SITES = {"client_values": "sites", "train_values": "training"}
"""The names in an export of a round's values by site: of their evaluation, and of their training."""

OF_AN_EVENT = ("event", "step", "epoch", "not_finite")


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers of one step, by the names under which a tool shows them."""

    axis: Axis
    step: int
    at: float
    """The instant of the measurement [s since the epoch]."""
    values: Mapping[str, float]
    """Finite numbers by name; rows of one step have distinct names."""


@dataclass(frozen=True, slots=True)
class About:
    """The description of a run."""

    id: str
    """The identity of the run, by which a destination recognises it: letters, digits, dots, - and _."""
    name: str
    group: str
    """The name that it shares with the runs that it is compared with."""
    created_at: float
    """The instant of its beginning [s since the epoch]."""
    settings: Mapping[str, Any]
    """The settings by dotted keys, plain values."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of a run, of which the newest counts."""

    state: str
    """`running`, or the state in which it has ended."""
    facts: Mapping[str, str | float] = field(default_factory=dict)
    """The cause, the newest version, the best one."""

    @property
    def has_ended(self) -> bool:
        """Return whether the run has ended; an interrupted one continues."""
        return self.state in ("finished", "failed", "stopped", "early")

    @property
    def has_failed(self) -> bool:
        """Return whether the run has ended without success."""
        return self.state in ("failed", "stopped")

    def document(self) -> dict[str, str | float]:
        """Return the state and the facts in one table."""
        return {"state": self.state, **self.facts}


def row_of_round(line: Mapping[str, Any], at: float, *, with_sites: bool = True) -> Row:
    """Return the row of a simulated round.

    Args:
        line: its line in `rounds.jsonl`.
        at: its end [s since the epoch].
        with_sites: whether the row has the values of each site.
    """
    values: dict[str, float] = {}
    for name, value in line.items():
        if name in GROUPS:
            values |= numbers(value or {}, f"{name}/")
        elif name in OF_SITES:
            for site, measured in (value or {}).items() if with_sites else ():
                values |= numbers(measured, f"{OF_SITES[name]}/{site}/")
        elif name not in WITHOUT_NUMBERS:
            values |= (
                numbers(value, f"round/{name}/") if isinstance(value, Mapping) else numbers({name: value}, "round/")
            )
    return Row("round", int(line["round"]), at, values)


def row_of_event(event: Mapping[str, Any], at: float) -> Row | None:
    """Return the row of an event of a training; None: it has no numbers of a step.

    Args:
        event: a line of `log.jsonl`.
        at: its instant [s since the epoch].
    """
    if event["event"] not in ("step", "evaluation"):
        return None
    found = numbers({name: value for name, value in event.items() if name not in OF_AN_EVENT})
    return Row("step", int(event["step"]), at, found) if found else None


def numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of a table, with a prefix before each name; truth values are no numbers."""
    return {
        f"{prefix}{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }

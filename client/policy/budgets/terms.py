"""The terms of privacy on which a run asks, as a site's budget reads them: what a training would spend at most.

A run gives its terms with the other values for its task (`local`), which an approval covers:

    {"epochs": 2, "privacy.unit": "example", "privacy.sample_rate": 0.01, "privacy.noise_multiplier": 1.1, ...}

With the unit "example" the site itself trains by these terms, clips and adds the noise. With "client" the coordinator
does, and is trusted to. A secure sum has its privacy in its own terms, which all members sign.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.client.policy.budgets.entries import NOISE_MAX, NOISE_MIN, RATE_MIN, STEPS_MAX
from atoll.client.policy.run_terms import NORM_MAX, NORM_MIN, number_of
from atoll.ground.printable import count_of
from atoll.protocol.privacy.composition import Steps
from atoll.protocol.privacy.guarantee import NoiseBy, Unit
from atoll.protocol.secure.privacy_terms import read_privacy
from atoll.protocol.secure.terms import Terms
from atoll.task.overrides import OverridesRefused
from atoll.task.round_schedule import read_schedule

PREFIX = "privacy."
"""The beginning of the keys with the terms."""

WITHOUT = "without differential privacy (no [privacy] of the run)"

ROUNDS_MAX = 10**6
"""Rounds of a schedule of which the most steps are taken."""

_KNOWN = {
    "unit",
    "noise_by",
    "mechanism",
    "separation_min",
    "sample_rate",
    "noise_multiplier",
    "clip_norm",
    "clip",
    "clip_quantile",
    "epsilon",
    "delta",
    "participations_max",
    "batch",
    "bits",
}
_PARTIES: dict[Unit, tuple[NoiseBy, ...]] = {"client": ("coordinator",), "example": ("site", "clients")}
"""The parties that may add the noise, the first if the terms name none."""


@dataclass(frozen=True, slots=True)
class Spending:
    """What a training spends by the terms of its run."""

    unit: Unit
    noise_by: NoiseBy
    steps: tuple[Steps, ...]


def has_terms(local: str) -> bool:
    """Return whether a run with these values for its task gives terms of privacy, known or not."""
    try:
        return any(key.startswith(PREFIX) for key in json.loads(local or "{}"))
    except (ValueError, RecursionError, TypeError):
        return False


def spending_of(local: str) -> Spending:
    """Return what a training of a run with these values spends.

    Raises:
        ValueError: nothing bounds what it tells; the message says why.
    """
    try:
        table = json.loads(local or "{}")
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, Mapping):
        raise ValueError("with settings that cannot be read")
    terms = {key.removeprefix(PREFIX): value for key, value in table.items() if key.startswith(PREFIX)}
    if not terms:
        raise ValueError(WITHOUT)
    if unknown := sorted({*terms} - _KNOWN):
        raise ValueError(f"with terms that this Atoll does not know: {', '.join(PREFIX + key for key in unknown[:3])}")
    unit = terms.get("unit")
    if not isinstance(unit, str) or unit not in _PARTIES:
        raise ValueError(f"with an unknown unit: {PREFIX}unit is {unit!r}")
    noise_by = terms.get("noise_by", _PARTIES[unit][0])
    if noise_by not in _PARTIES[unit]:
        allowed = ", ".join(map(repr, _PARTIES[unit]))
        raise ValueError(f"with noise by {noise_by!r} for one {unit}: allowed is {allowed}")
    mechanism = terms.get("mechanism", "gaussian")  # all rounds of correlated noise are one use: each is charged as it
    if mechanism != "gaussian" and (mechanism, unit) != ("correlated", "client"):
        raise ValueError(f"with {PREFIX}mechanism = {mechanism!r}, which this Atoll cannot charge")
    if (clip := terms.get("clip", "fixed")) not in ("fixed", "adaptive"):
        raise ValueError(f"with {PREFIX}clip = {clip!r}, which this Atoll cannot charge")
    z = number_of(terms, "noise_multiplier", NOISE_MIN, NOISE_MAX)
    number_of(terms, "clip_norm", NORM_MIN, NORM_MAX)
    if unit == "client":  # with an adaptive clip, the sum and the count of short updates are one use of z together
        return Spending(unit, noise_by, (Steps(z, 1.0, 1),))
    rate = number_of(terms, "sample_rate", RATE_MIN, 1.0)
    steps = 1 if noise_by == "clients" else _steps(table, rate)  # whatever else the run gives
    return Spending(unit, noise_by, (Steps(z, rate, steps),))


def spending_inside(of: Terms) -> Spending | None:
    """Return what an update spends inside a private secure sum; None: the sum is not private.

    The site itself clips the update. The members add the noise, of which the site checks that it suffices, or the
    coordinator does. Each masked update that leaves, of another attempt, spends as much again.

    Args:
        of: the sum.

    Raises:
        ValueError: the noise or the clip norm is out of range.
    """
    terms = read_privacy(of.privacy)
    if terms is None or terms.unit == "example":  # whose spending the values for the task tell
        return None
    numbers = {"noise_multiplier": terms.noise_multiplier, "clip_norm": of.clip_norm}
    z = number_of(numbers, "noise_multiplier", NOISE_MIN, NOISE_MAX)
    number_of(numbers, "clip_norm", NORM_MIN, NORM_MAX)
    return Spending("client", terms.noise_by, (Steps(z, 1.0, 1),))


def _steps(table: Mapping[str, Any], rate: float) -> int:
    """Return the most steps of one training in any round: epochs of 1 / q steps, and at most `max_steps`."""
    epoch = max(1, round(1.0 / rate))
    epochs, most = _largest(table, "epochs"), _largest(table, "max_steps")
    found: list[int] = [epochs * epoch] if epochs else []
    found += [most] if most else []
    if not found:
        raise ValueError("without a number of steps: the run sets local.max_steps, or local.epochs")
    if min(found) > STEPS_MAX:
        raise ValueError(f"with {count_of(min(found), 'step')} in one training: allowed are at most {STEPS_MAX}")
    return min(found)


def _largest(table: Mapping[str, Any], name: str) -> int:
    """Return the largest value of a whole setting in any round; 0: the run does not set it."""
    if name not in table or table[name] is None:
        return 0
    given = table[name]
    try:
        values: list[Any] = [given]
        if isinstance(given, Mapping):
            schedule = read_schedule(f"schedule.local.{name}", given)
            values = [schedule.at(turn) for turn in schedule.turns(ROUNDS_MAX)]
        numbers: list[int] = [math.ceil(each) for each in values if type(each) in (int, float)]
    except (OverridesRefused, ValueError, OverflowError):
        numbers, values = [], [given]
    if not numbers or len(numbers) < len(values) or min(numbers) < 1:
        raise ValueError(f"with {given!r} as local.{name}: allowed is a whole number from 1 on")
    return max(numbers)

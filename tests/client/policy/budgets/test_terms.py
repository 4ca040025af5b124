"""The terms of privacy as a site's budget reads them: what bounds a training, and what does not."""

import json
import math
from typing import Any

import pytest

from atoll.client.policy.budgets.terms import WITHOUT, Spending, spending_of
from atoll.protocol.privacy.composition import Steps

EXAMPLE = {
    "privacy.unit": "example",
    "privacy.sample_rate": 0.01,
    "privacy.noise_multiplier": 1.1,
    "privacy.clip_norm": 1.0,
    "privacy.epsilon": 8.0,
    "privacy.delta": 1e-6,
    "privacy.participations_max": 10,
}
CLIENT = {"privacy.unit": "client", "privacy.noise_multiplier": 4, "privacy.clip_norm": 0.5}


def of(terms: dict[str, Any], **changed: Any) -> Spending:
    table = terms | {f"privacy.{name}": value for name, value in changed.items() if name not in ("epochs", "max_steps")}
    table |= {name: value for name, value in changed.items() if name in ("epochs", "max_steps")}
    return spending_of(json.dumps({name: value for name, value in table.items() if value != "absent"}))


def test_a_guarantee_for_clients_is_one_step_of_its_noise_by_the_coordinator() -> None:
    assert of(CLIENT) == Spending("client", "coordinator", (Steps(4.0, 1.0, 1),))
    assert of(CLIENT, clip="adaptive", clip_quantile=0.5) == of(CLIENT), "its count is in the charge"


@pytest.mark.parametrize(
    ("local", "steps"),
    [
        ({"epochs": 2}, 200),
        ({"max_steps": 30}, 30),
        ({"epochs": 2, "max_steps": 30}, 30),
        ({"epochs": 2, "max_steps": 300}, 200),
        ({"epochs": {"kind": "list", "values": [1, 3, 2]}}, 300),
        ({"max_steps": {"kind": "linear", "start": 10, "end": 90, "rounds": 5}}, 90),
        ({"max_steps": {"kind": "linear", "start": 90, "end": 10.2, "rounds": 5}}, 90),
    ],
)
def test_a_guarantee_for_examples_is_the_most_steps_of_any_round(local: dict[str, Any], steps: int) -> None:
    assert of(EXAMPLE, **local) == Spending("example", "site", (Steps(1.1, 0.01, steps),))


@pytest.mark.parametrize(
    ("terms", "changed", "why"),
    [
        ({}, {}, WITHOUT),
        (CLIENT, {"noise_multiplier": 0}, "with 0 as privacy.noise_multiplier"),
        (CLIENT, {"noise_multiplier": -1.0}, "with -1.0 as privacy.noise_multiplier"),
        (CLIENT, {"noise_multiplier": math.nan}, "with nan as privacy.noise_multiplier"),
        (CLIENT, {"noise_multiplier": math.inf}, "with inf as privacy.noise_multiplier"),
        (CLIENT, {"noise_multiplier": True}, "with True as privacy.noise_multiplier"),
        (CLIENT, {"noise_multiplier": "absent"}, "without privacy.noise_multiplier"),
        (CLIENT, {"clip_norm": 1e10}, "with 10000000000.0 as privacy.clip_norm"),
        (CLIENT, {"clip_norm": "adaptive"}, "with 'adaptive' as privacy.clip_norm"),
        (CLIENT, {"clip": "none"}, "with privacy.clip = 'none', which"),
        (CLIENT, {"noise_by": "site"}, "with noise by 'site' for one client"),
        (CLIENT, {"noise_by": "clients"}, "with noise by 'clients' for one client"),
        (CLIENT, {"mechanism": "trees"}, "privacy.mechanism = 'trees'"),
        (EXAMPLE, {"epochs": 1, "mechanism": "correlated"}, "privacy.mechanism = 'correlated'"),
        (CLIENT, {"subsample": 0.1}, "does not know: privacy.subsample"),
        (CLIENT, {"unit": "batch"}, "privacy.unit is 'batch'"),
        (CLIENT, {"unit": ["client"]}, "privacy.unit is ['client']"),
        (CLIENT, {"noise_multiplier": 1e-200}, "with 1e-200 as privacy.noise_multiplier"),
        (CLIENT, {"noise_multiplier": 10**400}, "as privacy.noise_multiplier"),
        (EXAMPLE, {"epochs": 1, "sample_rate": 5e-324}, "with 5e-324 as privacy.sample_rate"),
        (EXAMPLE, {"epochs": 1, "sample_rate": 1.5}, "with 1.5 as privacy.sample_rate"),
        (EXAMPLE, {"epochs": 1, "sample_rate": "absent"}, "without privacy.sample_rate"),
        (EXAMPLE, {"epochs": 1, "noise_by": "coordinator"}, "with noise by 'coordinator' for one example"),
        (EXAMPLE, {}, "without a number of steps"),
        (EXAMPLE, {"epochs": 0}, "with 0 as local.epochs"),
        (EXAMPLE, {"epochs": "two"}, "with 'two' as local.epochs"),
        (EXAMPLE, {"max_steps": 10**13}, "with 10000000000000 steps"),
        (EXAMPLE, {"max_steps": {"kind": "exponential", "start": 2, "factor": 2.0}}, "as local.max_steps"),
        (EXAMPLE, {"max_steps": {"kind": "magic"}}, "as local.max_steps"),
    ],
)
def test_what_nothing_bounds_is_refused_with_what_is_allowed(
    terms: dict[str, Any], changed: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=r"^with") as refused:
        of(terms, **changed) if terms else spending_of('{"epochs": 2}')
    assert why in str(refused.value)


@pytest.mark.parametrize("local", ["", "[]", "{", "7", "[" * 100_000])
def test_values_that_cannot_be_read_are_refused(local: str) -> None:
    with pytest.raises(ValueError, match=r"^with"):
        spending_of(local)

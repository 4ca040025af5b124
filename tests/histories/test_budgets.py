"""Private runs in simulated worlds: no client is used beyond its budget, whatever fails."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from atoll.server.members.membership import Membership
from atoll.server.rounds.privacy_rules import (
    CorrelatedRules,
    ExampleRules,
    PrivacyRules,
    SharedExampleRules,
    SharedRules,
)
from tests.histories.judge import BadHistory, judged
from tests.histories.scenario import BUDGETS, random_scenario

SEEDS = 120
"""Worlds with budgets; `make soak` judges ten thousand."""


@pytest.mark.parametrize("first", range(0, SEEDS, 40))
def test_every_history_keeps_its_budgets(first: int) -> None:
    charged, ends = 0, 0
    for seed in range(first, first + 40):
        history = judged(seed, preset=BUDGETS)
        charged += sum(record.charge is not None for record in history.records.values())
        assert history.machine is not None
        ends += "the privacy budget is spent" in history.machine.ledger.cause
    assert charged > 40
    assert ends > 3


def test_the_worlds_have_every_kind_of_guarantee_and_mode() -> None:
    drawn = [random_scenario(seed, BUDGETS).rules for seed in range(SEEDS)]
    kinds = {(type(rules.privacy), rules.policy.mode, rules.secure is not None) for rules in drawn}
    assert kinds == {
        *((kind, "sync", is_secure) for kind in (PrivacyRules, ExampleRules) for is_secure in (False, True)),
        *((kind, "sync", True) for kind in (SharedRules, SharedExampleRules)),
        (CorrelatedRules, "sync", False),
        *((ExampleRules, mode, False) for mode in ("fedbuff", "fedasync")),
    }


def judge(seeds: Iterable[int]) -> None:
    for seed in seeds:
        judged(seed, preset=BUDGETS)


def _free(_: Membership, *__: Any) -> None:
    """Charge nothing."""


def _doubled(charge: Callable[..., None]) -> Callable[..., None]:
    """Return a charge that is made twice."""

    def twice(*given: Any) -> None:
        charge(*given)
        charge(*given)

    return twice


@pytest.mark.parametrize(
    ("method", "broken", "what"),
    [
        ("charge", _free, "was charged 0 times, and used|is used 2 times|beyond its budget"),
        ("charge", _doubled(Membership.charge), "was charged 2 times, and used 1 times"),
        ("_mark", _free, "beyond its budget"),
        ("keep_apart", _free, "in versions that are not 2 apart"),
    ],
    ids=["nothing is charged", "everything twice", "a spent client is asked again", "nobody is kept apart"],
)
def test_a_wrong_charge_is_found(monkeypatch: pytest.MonkeyPatch, method: str, broken: Any, what: str) -> None:
    monkeypatch.setattr(Membership, method, broken)
    with pytest.raises(BadHistory, match=what):
        judge(range(40))

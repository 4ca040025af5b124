"""Dishonest moves of a coordinator against a site's budget, each with 20 seeds, by the numbers of the list of moves."""

import math
import random
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from atoll.client.policy.decide import Rule, Standing
from atoll.client.policy.history import PolicyHistory
from atoll.protocol.privacy.gaussian import mu_within
from atoll.server.rounds.privacy_rules import PrivacyRules
from tests.client.policy.budgets.test_gate import Site, private
from tests.client.policy.budgets.test_terms import EXAMPLE
from tests.client.policy.test_gate import RUN, invitation, version
from tests.server.sessions.small_federation import privacy_of, terms_of

SEEDS = range(20)
NO_NOISE = (0.0, -1.0, 1e-300, 1e-9, float("nan"), float("inf"), None, True, "much")
NO_NORM = (0.0, -0.5, float("nan"), float("inf"), None, "long")
HUGE = (1e30, 1e300, 10**40, sys.float_info.max, math.nextafter(1e9, math.inf), 1.5e9)
"""Clip norms above what a site takes for one: the noise would leave nothing of an update, or the sum no number."""


def drawn(draw: random.Random) -> dict[str, Any]:
    """Return terms of a run with a guarantee for examples."""
    return EXAMPLE | {
        "privacy.noise_multiplier": draw.uniform(1.0, 4.0),
        "privacy.clip_norm": draw.uniform(0.1, 2.0),
        "privacy.epsilon": draw.uniform(1.0, 9.0),
        "privacy.participations_max": draw.randint(1, 50),
        "max_steps": draw.randint(1, 3),
    }


def site_of(tmp_path: Path, seed: int, before: str = "") -> Site:
    folder = tmp_path / str(seed)
    folder.mkdir()
    return Site(folder, unit="example", before=before)


def test_a_budget_noise_or_number_of_uses_that_changes_after_the_approval_waits(tmp_path: Path) -> None:  # 42
    for seed in SEEDS:
        draw = random.Random(f"changed {seed}")
        site, terms = site_of(tmp_path, seed, 'approval = "each_run"\n'), drawn(draw)
        assert site.gate.ask(private(terms=terms)).rule is Rule.APPROVAL
        with closing(PolicyHistory(site.folder)) as history:
            history.decided(RUN, Standing.APPROVED, 1.0)
        assert site.gate.ask(private(terms=terms)).is_allowed
        names = ["epsilon", "noise_multiplier", "participations_max", "clip_norm"]
        for name in draw.sample(names, draw.randint(1, len(names))):
            key, factor = f"privacy.{name}", draw.choice([2, 3, 10])
            changed = terms | {key: terms[key] * factor}
            decision = site.gate.admit(private(draw.randint(1, 9), terms=changed), version())
            assert (decision.is_allowed, decision.rule) == (False, Rule.APPROVAL), name
        assert site.lines("privacy.charge") == []
        site.gate.close()


def test_terms_without_noise_or_norm_are_refused_by_the_budget(tmp_path: Path) -> None:  # 43
    for seed in SEEDS:
        draw = random.Random(f"without noise {seed}")
        site, terms = site_of(tmp_path, seed), drawn(draw)
        for key, values in (("privacy.noise_multiplier", NO_NOISE), ("privacy.clip_norm", NO_NORM)):
            for value in draw.sample(values, 3):
                decision = site.gate.admit(private(draw.randint(1, 9), terms=terms | {key: value}), version())
                assert (decision.is_allowed, decision.rule) == (False, Rule.BUDGET), (key, value)
        little = privacy_of(noise_multiplier=10.0 ** -draw.randint(2, 9)).text()
        of_sum = invitation(1, local="{}", secure=terms_of(privacy=little))
        assert site.gate.ask(of_sum).rule is Rule.BUDGET
        assert site.lines("privacy.charge") == []
        assert seed or site.gate.ask(private(1, terms=terms)).is_allowed, "the terms themselves are"
        site.gate.close()


def test_a_clip_norm_that_is_finite_and_huge_is_refused_by_the_budget(tmp_path: Path) -> None:  # 43
    for seed in SEEDS:
        draw = random.Random(f"huge norm {seed}")
        site, terms = site_of(tmp_path, seed), drawn(draw)
        if draw.random() < 0.5:  # which counts for examples, too
            terms = {"privacy.unit": "client", "privacy.noise_multiplier": draw.uniform(3.0, 9.0)}
        huge = [*HUGE, *(10.0 ** draw.uniform(9.001, 308.0) for _ in range(6))]
        shared = privacy_of(noise_multiplier=draw.uniform(3.0, 9.0)).text()
        for norm in huge:
            number = draw.randint(1, 9)
            with_it = private(number, terms=terms | {"privacy.clip_norm": norm})
            in_sum = invitation(number, local="{}", secure=terms_of(privacy=shared, clip_norm=float(norm)))
            for asked in (with_it, in_sum):
                decision = site.gate.admit(asked, version())
                assert (decision.is_allowed, decision.rule) == (False, Rule.BUDGET), norm
                assert "privacy.clip_norm: allowed is a number in 1e-09..1e+09" in decision.detail
        assert site.lines("privacy.charge") == []
        largest = private(1, terms=terms | {"privacy.clip_norm": 1e9})
        assert site.gate.admit(largest, version()).is_allowed, "it is the noise that bounds what is told"
        of_sum = invitation(2, local="{}", secure=terms_of(privacy=shared, clip_norm=draw.uniform(0.1, 1e9)))
        assert site.gate.admit(of_sum, version()).is_allowed
        site.gate.close()


def test_a_fold_without_noise_is_not_seen_and_each_record_names_the_coordinator_as_trusted(
    tmp_path: Path,
) -> None:  # 45
    for seed in SEEDS:
        draw = random.Random(f"no noise {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        site, z = Site(folder), draw.uniform(3.0, 9.0)
        terms = {"privacy.unit": "client", "privacy.noise_multiplier": z, "privacy.clip_norm": draw.uniform(0.1, 2.0)}
        assert site.gate.admit(private(1, terms=terms), version()).is_allowed
        [line] = site.lines("privacy.charge")
        assert "noise by the coordinator, which is trusted to add it" in line
        delta, uses = 10.0 ** -draw.randint(4, 8), draw.randint(1, 20)
        of_run = PrivacyRules(8.0, delta, z, 1.0, 99, mu_within(8.0, delta) ** 2)
        sentence = of_run.guarantee(of_run.spent_after(0.0, 0, uses), uses).sentence
        assert "the coordinator adds the noise, and is trusted to add it" in sentence
        site.gate.close()

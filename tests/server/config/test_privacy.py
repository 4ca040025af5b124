"""The table `[privacy]`: the rules that it gives a run, and every setting that does not go with it."""

from collections.abc import Sequence

import pytest

from atoll.protocol.privacy.gaussian import epsilon_of, mu_of
from atoll.protocol.settings import ConfigError, effective, load_text
from atoll.server.config.privacy import faults_of_layout
from atoll.server.config.run import RunConfig, RunFile
from atoll.server.config.run_changes import changed, differing_keys, with_noise
from atoll.server.journal.codec import decode_rules, encode_rules
from atoll.tensors.layout import Tensor

TEN = "round.cohort_size=10"
PRIVATE = ["privacy.epsilon=8.0", "privacy.delta=1e-6", "privacy.clip_norm=1.0", 'aggregation.weighting="uniform"']


def run_with(overrides: Sequence[str]) -> RunConfig:
    cohort = [] if any("fedbuff" in each or "fedasync" in each for each in overrides) else [TEN]
    return load_text(RunFile, 'task = "m:t"', [*cohort, *PRIVATE, *overrides], name="run.toml").run


def faults_of(overrides: Sequence[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        run_with(overrides)
    return tuple(fault.removeprefix("run.toml: ").removeprefix("--set: ") for fault in caught.value.faults)


def test_the_noise_is_calibrated_for_all_uses_of_a_client() -> None:
    for given, uses in (([], 10), (["rounds=200", "privacy.participations_max=7"], 7)):
        rules = run_with(given).rules.privacy
        assert rules is not None
        assert rules.participations_max == uses
        assert epsilon_of(mu_of([(rules.noise_multiplier, uses)]), 1e-6) == pytest.approx(8.0, abs=1e-6)
        spent = 0.0
        for number in range(uses):
            assert rules.allows(spent, number)
            spent += rules.cost
        assert not rules.allows(spent, uses)
        assert not rules.allows(spent, 0), "the budget itself is spent, too"


def test_the_rules_and_the_settings_survive_their_encoding() -> None:
    config = run_with(["privacy.noise_multiplier=2.5"])
    assert load_text(RunConfig, effective(config), name="") == config
    assert decode_rules(encode_rules(config.rules), where="") == config.rules
    assert config.rules.keep_sites == 0, "metrics of single sites have no noise"


def test_a_run_without_the_table_has_the_rules_of_before() -> None:
    config = load_text(RunFile, 'task = "m:t"', name="run.toml").run
    before = encode_rules(config.rules).replace(',"privacy":null', "")
    assert "privacy" not in before
    assert decode_rules(before, where="an earlier journal") == config.rules


ALONE = {
    "secure.clip_norm=1.0": "privacy: the run has [secure], too",
    'round.mode="fedbuff"': "round.mode",
    'round.late="next_round"': "round.late",
    'round.partial_work="scaled"': "round.partial_work",
    "privacy.delta=0.1": "privacy.delta: got 0.1, and with [privacy] 1 / 10 or more",
    "privacy.noise_multiplier=0.1": "privacy.noise_multiplier: got 0.1, and with [privacy] one round costs epsilon",
    'aggregation.weighting="examples"': "aggregation.weighting",
    'aggregation.algorithm="fednova"': "aggregation.algorithm",
    'aggregation.rule="median"': "aggregation.rule",
    "aggregation.norm_bound=1.0": "aggregation.norm_bound",
    "aggregation.partial=true": "aggregation.partial",
    'aggregation.device="cuda"': "aggregation.device",
    'cohort.sampler="oort"': "cohort.sampler",
    'cohort.sampler="weighted"': "cohort.sampler",
    "evaluation.clients_every=1": "evaluation.clients_every",
    'program.main="m:f"': "program.main",
}


@pytest.mark.parametrize("override", ALONE)
def test_what_does_not_go_with_it_is_refused(override: str) -> None:
    more = ["round.quorum=10"] if "secure" in override else []
    faults = faults_of([override, *more])
    assert any(fault.startswith(ALONE[override]) for fault in faults), faults
    assert all(" allowed" in fault for fault in faults)


def test_all_of_it_at_once() -> None:
    together = [
        each
        for each in ALONE
        if not each.startswith(
            ("secure", "round.mode", "program", "aggregation.algorithm", "aggregation.partial", "aggregation.device")
        )
    ]
    keys = {each.partition("=")[0] for each in together}
    faults = faults_of(together)
    assert {fault.partition(":")[0] for fault in faults} >= keys, faults


@pytest.mark.parametrize("key", ["epsilon", "delta", "clip_norm", "noise_multiplier"])
@pytest.mark.parametrize("value", ["0", "-1.0", "nan", "inf"])
def test_numbers_that_promise_nothing_are_refused(key: str, value: str) -> None:
    [fault] = faults_of([f"privacy.{key}={value}"])
    assert fault.startswith(f"privacy.{key}: got {value}; allowed: ")


@pytest.mark.parametrize(
    "override", ['privacy.unit="site"', 'privacy.mechanism="correlated"', 'privacy.noise_by="clients"']
)
def test_what_is_not_built_is_refused(override: str) -> None:
    [fault] = faults_of([override])
    assert fault.startswith(override.partition("=")[0])


def test_only_the_budget_changes_at_a_resume_and_the_noise_stays() -> None:
    config = with_noise(run_with([]))
    assert config.privacy is not None
    more = changed(config, ["privacy.epsilon=9.0", "rounds=40", "privacy.participations_max=30"], version=3)
    assert more.rules.privacy is not None
    assert more.rules.privacy.noise_multiplier == config.privacy.noise_multiplier
    for key, value in (("noise_multiplier", 3.0), ("clip_norm", 9.0), ("delta", 1e-3)):
        with pytest.raises(ConfigError, match=f"privacy.{key}: fixed for the life of a run"):
            changed(config, [f"privacy.{key}={value}"], version=3)
    assert differing_keys(config, run_with([])) == [], "the same file names the same run"


def test_tensors_without_noise_are_refused_by_name() -> None:
    rules = run_with([]).rules.privacy
    assert rules is not None
    weight = Tensor("w", "F32", (3, 3))
    assert [*faults_of_layout([weight], frozenset(), rules)] == []
    layout = [weight, Tensor("bn.mean", "F32", (3,)), Tensor("bn.count", "I64", ()), Tensor("control/w", "F32", (3, 3))]
    faults = [*faults_of_layout(layout, frozenset({"bn.mean"}), rules)]
    assert ["bn.count" in faults[0], "control/w" in faults[1], "bn.mean" in faults[2]] == [True] * 3
    assert all("allowed is a model without them" in fault for fault in faults)

"""The table `[privacy]`: the rules that it gives a run, and every setting that does not go with it."""

from collections.abc import Sequence

import pytest

from atoll.protocol.privacy.adaptive_clip import AdaptiveClip
from atoll.protocol.privacy.correlated import best_bands, inverse_square_root, sensitivity
from atoll.protocol.privacy.gaussian import epsilon_of, mu_of, noise_multiplier_of
from atoll.protocol.settings import ConfigError, effective, load_text
from atoll.server.config.privacy import faults_of_layout
from atoll.server.config.run import RunConfig, RunFile
from atoll.server.config.run_changes import changed, differing_keys, with_noise
from atoll.server.journal.codec import decode_rules, encode_rules
from atoll.server.rounds.privacy_rules import CorrelatedRules, SharedRules
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
    faults = faults_of([override])
    assert any(fault.startswith(ALONE[override]) for fault in faults), faults
    assert all(" allowed" in fault for fault in faults)


def test_all_of_it_at_once() -> None:
    together = [
        each
        for each in ALONE
        if not each.startswith(
            ("round.mode", "program", "aggregation.algorithm", "aggregation.partial", "aggregation.device")
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


@pytest.mark.parametrize("override", ['privacy.unit="site"', 'privacy.mechanism="trees"'])
def test_what_is_not_built_is_refused(override: str) -> None:
    [fault] = faults_of([override])
    assert fault.startswith(override.partition("=")[0])


SHARED = ['privacy.noise_by="clients"', "secure.clip_norm=1.0"]


def test_the_clients_share_follows_from_threshold_and_colluders() -> None:
    """A session of 10 opens with 7; less one colluder, 6 honest shares suffice."""
    config = run_with(SHARED)
    privacy, secure = config.rules.privacy, config.rules.secure
    assert isinstance(privacy, SharedRules)
    assert secure is not None
    assert (privacy.noise_by, privacy.honest_min, privacy.colluders, privacy.sum_min) == ("clients", 6, 1, 7)
    assert (secure.is_private, secure.sum_min, secure.metrics) == (True, 7, ())
    assert secure.share == pytest.approx(privacy.noise_multiplier * (2**21 - 1) / 6**0.5, rel=1e-12)
    assert decode_rules(encode_rules(config.rules), where="") == config.rules
    more = run_with([*SHARED, "privacy.colluders=2", "secure.sessions=2", "round.cohort_size=16", "round.quorum=12"])
    assert isinstance(more.rules.privacy, SharedRules)
    assert (more.rules.privacy.honest_min, more.rules.privacy.sum_min) == (4, 6)  # 8 members open with 6
    assert [line for line in more.notices if line.startswith("secure.sessions: got 2, and each sum has its noise")]
    fewer = run_with([*SHARED, "privacy.honest_min=3", "round.quorum=5"]).rules.privacy
    assert isinstance(fewer, SharedRules)
    assert (fewer.honest_min, fewer.sum_min) == (3, 4)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (['privacy.noise_by="clients"'], 'privacy.noise_by: got "clients", and with [privacy] the clients add their'),
        (["privacy.honest_min=3"], "privacy.honest_min: got 3, and with [privacy] the coordinator adds the noise"),
        (["privacy.colluders=0"], "privacy.colluders: got 0, and with [privacy] the coordinator adds the noise"),
        ([*SHARED, "secure.clip_norm=2.0"], "secure.clip_norm: got 2.0, and with [privacy] each site clips"),
        ([*SHARED, "secure.metrics.f1=2"], "secure.metrics: got ['f1'], and with [privacy] their sums"),
        ([*SHARED, "round.quorum=6"], "round.quorum: got 6, and with [privacy] a sum has at least 7 members"),
        ([*SHARED, "privacy.honest_min=10"], "privacy.honest_min: got 10, and with [privacy] with 1 colluder a sum"),
        ([*SHARED, "privacy.colluders=4"], "privacy.colluders: got 4, and with [privacy] 7 of the 10 members"),
        ([*SHARED, "privacy.epsilon=0.05"], "privacy.noise_multiplier: 10 members in words of 32 bits"),
        (
            [*SHARED, 'privacy.noise_by="coordinator"', "privacy.epsilon=0.01", "secure.bits=64"],
            "privacy.noise_multiplier: one member's noise has a standard deviation",
        ),
    ],
)
def test_noise_that_does_not_fit_the_secure_sums_is_refused(overrides: list[str], fault: str) -> None:
    faults = faults_of(overrides)
    assert any(each.startswith(fault) for each in faults), faults
    assert all(" allowed" in each for each in faults)


def test_all_faults_of_shared_noise_come_at_once() -> None:
    faults = faults_of([*SHARED, "secure.clip_norm=2.0", "secure.metrics.f1=2", "round.quorum=3", "privacy.delta=0.5"])
    assert {fault.partition(":")[0] for fault in faults} >= {
        "secure.clip_norm",
        "secure.metrics",
        "round.quorum",
        "privacy.delta",
    }


def test_the_coordinator_may_add_the_noise_to_opened_sums() -> None:
    rules = run_with(["secure.clip_norm=1.0"]).rules
    assert rules.privacy is not None
    assert rules.secure is not None
    assert (rules.privacy.noise_by, rules.privacy.sum_min, rules.secure.share) == ("coordinator", 0, 0.0)
    assert rules.secure.is_private, "rounded to the nearest, and without metrics"


def test_the_sentence_names_who_adds_the_noise_and_against_whom() -> None:
    rules = run_with(SHARED).rules.privacy
    assert rules is not None
    sentence = rules.guarantee(rules.cost, 1).sentence
    assert (
        "the clients add the noise inside their secure sums, so that it holds against the coordinator and 1 client "
        "that may work together with it: a sum has at least 7 members, and the noise of any 6 of them suffices"
    ) in sentence
    rules = run_with(["secure.clip_norm=1.0"]).rules.privacy
    assert rules is not None
    assert "the coordinator adds the noise, and is trusted to add it" in rules.guarantee(rules.cost, 1).sentence


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
    secure = run_with(SHARED).rules.secure
    assert secure is not None
    assert [*faults_of_layout([weight], frozenset(), rules, secure)] == []
    assert "bn.count" in next(faults_of_layout(layout, frozenset(), rules, secure))


def test_an_adaptive_clip_norm_has_its_rule() -> None:
    rules = run_with(['privacy.clip="adaptive"', "round.cohort_size=1000", "privacy.noise_multiplier=2"]).rules.privacy
    assert rules is not None
    assert rules.adaptive == AdaptiveClip(0.5, 0.2, 50.0, 1000)
    assert rules.sum_multiplier == pytest.approx(1 / (1 / 4 - 1 / 100**2) ** 0.5)
    few = run_with(['privacy.clip="adaptive"', "privacy.noise_multiplier=2"]).rules.privacy
    assert few is not None
    assert few.adaptive == AdaptiveClip(0.5, 0.2, 10.0, 10), "a count of ten clients has five times the noise of z"
    assert "follows the quantile 0.5 of their lengths" in few.guarantee(few.cost, 1).sentence
    assert few.epsilon_of(few.cost) == epsilon_of(0.5, 1e-6), "both parts are charged as z"


def test_settings_of_an_adaptive_clip_norm_are_refused_where_they_do_nothing_or_cost_too_much() -> None:
    (fault,) = faults_of(["privacy.clip_quantile=0.3"])
    assert fault == 'privacy.clip_quantile: got 0.3, and the clip norm is fixed: allowed with privacy.clip = "adaptive"'
    (fault,) = faults_of(['privacy.clip="adaptive"', "privacy.noise_multiplier=4", "privacy.clip_sigma=2"])
    assert "privacy.clip_sigma: got 2" in fault
    assert "the count alone would cost more than a round" in fault
    for others in (SHARED, ["privacy.unit=example", "privacy.sample_rate=0.1", 'privacy.noise_by="site"']):
        faults = faults_of([*others, "privacy.clip=adaptive"])
        assert any(fault.startswith("privacy.clip: got ") for fault in faults), faults
    for setting in ("clip_quantile=1", "clip_learning_rate=0", "clip_sigma=-1", "clip_sigma=nan"):
        assert faults_of(['privacy.clip="adaptive"', f"privacy.{setting}"])[0].startswith(f"privacy.{setting[:9]}")


CORRELATED = ['privacy.mechanism="correlated"', "privacy.separation_min=4"]


def test_correlated_noise_is_of_all_rounds_together() -> None:
    config = with_noise(run_with([*CORRELATED, "rounds=20"]))
    of_run = config.rules.privacy
    assert isinstance(of_run, CorrelatedRules)
    assert of_run.noise_multiplier == noise_multiplier_of(of_run.epsilon, of_run.delta)
    assert (of_run.rounds, of_run.apart, of_run.participations_max) == (20, 4, 5)
    assert of_run.bands == best_bands(20, 4, 5)
    scale = sensitivity(inverse_square_root(of_run.bands), 20, 4, 5)
    assert of_run.sum_multiplier == pytest.approx(of_run.noise_multiplier * scale)
    assert config.given["privacy.mechanism"] == "correlated"
    assert config.given["privacy.separation_min"] == 4
    assert config.privacy is not None
    assert config.privacy.bands == of_run.bands, "a later Atoll may choose others"
    assert decode_rules(encode_rules(config.rules), where="here") == config.rules
    assert differing_keys(config, run_with([*CORRELATED, "rounds=20"])) == []


def test_it_is_said_that_rounds_wait_for_clients_and_that_one_band_is_independent_noise() -> None:
    [line] = [line for line in run_with([*CORRELATED, "rounds=20"]).notices if line.startswith("privacy.")]
    assert line == "privacy.separation_min: rounds wait unless round.cohort_size times 4 clients or more take part"
    apart = ["privacy.separation_min=1", "rounds=20"]
    [line] = [line for line in run_with([*CORRELATED, *apart]).notices if line.startswith("privacy.")]
    assert line.endswith('with one band, the best at a small separation, the noise is that of "gaussian"')
    assert [*run_with([*CORRELATED, *apart, "privacy.bands=2"]).notices] == []


def test_correlated_noise_that_rounding_would_make_much_longer_is_refused() -> None:
    rules = run_with([*CORRELATED, "rounds=2000"]).rules.privacy
    assert rules is not None
    assert [*faults_of_layout([Tensor("w", "F32", (1000, 1000))], frozenset(), rules)] == []
    [fault] = faults_of_layout([Tensor("w", "F32", (10**6, 10**6))], frozenset(), rules)
    assert fault.startswith("privacy.noise_multiplier: correlated noise of 2000 rounds for updates of")


WHY = 'privacy.mechanism: got "correlated", and with [privacy] '
EXCLUDED = {
    "privacy.separation_min=30": "privacy.separation_min: got 30, and the run has 20 rounds: allowed is 1 to 20",
    "privacy.bands=25": "privacy.bands: got 25, and the run has 20 rounds: allowed is 1 to 20",
    'privacy.clip="adaptive"': f"{WHY}its noise is computed for one clip norm",
    "secure.clip_norm=1.0": f"{WHY}the noise of earlier rounds is not on the grid",
    'privacy.noise_by="clients"': f"{WHY}shares of clients that are gone",
    'privacy.unit="example"': f"{WHY}each site adds the noise of its own steps",
    "rounds=3000": "rounds: got 3000, over which correlated noise is not computed: allowed is at most 2000",
    "privacy.noise_multiplier=0.1": "privacy.noise_multiplier: got 0.1, and with [privacy] all rounds together cost",
}


@pytest.mark.parametrize("override", EXCLUDED)
def test_what_correlated_noise_excludes_is_refused(override: str) -> None:
    extra = ["privacy.sample_rate=0.1"] if "example" in override else []
    faults = faults_of([*CORRELATED, "rounds=20", *extra, override])
    assert any(fault.startswith(EXCLUDED[override]) for fault in faults), faults


def test_settings_of_correlated_noise_are_refused_where_they_do_nothing_and_the_separation_is_named() -> None:
    faults = faults_of(["privacy.separation_min=4", "privacy.bands=2"])
    assert [fault.partition(":")[0] for fault in faults] == ["privacy.separation_min", "privacy.bands"]
    [missing] = faults_of(['privacy.mechanism="correlated"'])
    assert missing.startswith('privacy.separation_min: missing: privacy.mechanism = "correlated" needs it')


def test_what_determines_correlated_noise_stays_at_a_resume() -> None:
    config = with_noise(run_with([*CORRELATED, "rounds=20"]))
    for override in ("rounds=30", "privacy.participations_max=2", "privacy.separation_min=2", "privacy.bands=1"):
        with pytest.raises(ConfigError, match=f"--set: {override.partition('=')[0]}: "):
            changed(config, [override], version=3)
    assert changed(config, ["privacy.epsilon=9.0"], version=3).rules.privacy is not None

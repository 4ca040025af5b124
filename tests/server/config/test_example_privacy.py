"""The table `[privacy]` with `unit = "example"`: its rules and terms, and every setting that does not go with it."""

from collections.abc import Sequence

import pytest

from atoll.client.policy.budgets.terms import spending_of
from atoll.protocol.privacy import loss_distribution
from atoll.protocol.privacy.composition import Steps
from atoll.protocol.privacy.subsampled import epsilon_bound
from atoll.protocol.settings import ConfigError, load_text
from atoll.server.config.run import RunConfig, RunFile
from atoll.server.config.run_changes import changed, with_noise
from atoll.server.folding.reducer import private_of
from atoll.server.journal.codec import decode_rules, encode_rules
from atoll.server.rounds.privacy_rules import ExampleRules
from atoll.task.given import Given
from atoll.training.private.config import PrivacyConfig
from atoll.training.private.local_steps import PrivateTerms

PRIVATE = [
    'privacy.unit="example"',
    "privacy.epsilon=8.0",
    "privacy.delta=1e-5",
    "privacy.clip_norm=1.0",
    "privacy.sample_rate=0.04",
    "round.cohort_size=4",
]
STEPS = "local.max_steps=15"
NOISY = "privacy.noise_multiplier=3.0"


def run_with(overrides: Sequence[str]) -> RunConfig:
    return load_text(RunFile, 'task = "m:t"', [*PRIVATE, *overrides], name="run.toml").run


def faults_of(overrides: Sequence[str], of: Sequence[str] = PRIVATE) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_text(RunFile, 'task = "m:t"', [*of, *overrides], name="run.toml")
    return [fault.removeprefix("run.toml: ").removeprefix("--set: ") for fault in caught.value.faults]


def rules_of(config: RunConfig) -> ExampleRules:
    rules = config.rules.privacy
    assert isinstance(rules, ExampleRules)
    return rules


@pytest.mark.skipif(not loss_distribution.is_installed(), reason="needs the extra `privacy`")
def test_epsilon_of_all_steps_is_the_value_of_another_accountant() -> None:
    """Opacus and dp-accounting say 6.768787 for 2,250 steps at rate 0.04 with noise 1.5, by RDP 7.329335."""
    rules = rules_of(run_with([STEPS, "rounds=150", "privacy.noise_multiplier=1.5"]))
    assert (rules.cost, rules.spent_max) == (15, 2250.0)
    assert rules.epsilon_of(2250) == pytest.approx(6.768787, abs=1e-5)
    guarantee = rules.guarantee(2250, 150)
    assert "2250 steps, in each of which every example takes part with probability 0.04" in guarantee.sentence
    assert "each site adds the noise of its own examples" in guarantee.sentence


def test_epsilon_is_an_upper_bound_that_never_falls_and_ends_within_the_budget() -> None:
    rules = rules_of(run_with([STEPS, "rounds=20", "privacy.epsilon=1.0"]))
    found = [rules.epsilon_of(15 * uses) for uses in range(21)]
    assert found[0] == 0.0
    assert found == sorted(found)
    assert 0.99 <= found[-1] <= 1.0
    z = rules.noise_multiplier
    assert all(e <= epsilon_bound(0.04, z, 15 * uses, 1e-5) for uses, e in enumerate(found[1:], 1))
    assert rules.allows(15 * 19, 19)
    assert not rules.allows(15 * 20, 19)
    assert not rules.allows(0, 20)


def test_a_given_noise_ends_the_budget_before_the_last_round() -> None:
    rules = rules_of(run_with([STEPS, "rounds=100", NOISY, "privacy.epsilon=1.0"]))
    uses = round(rules.spent_max / 15)
    assert epsilon_bound(0.04, 3.0, 15 * uses, 1e-5) < 1.1
    assert rules.epsilon_of(rules.spent_max) <= 1.0 < epsilon_bound(0.04, 3.0, 15 * (uses + 4), 1e-5)
    assert not rules.allows(rules.spent_max, 0)


@pytest.mark.parametrize(
    ("local", "steps"),
    [
        (["local.max_steps=15"], 15),
        (["local.epochs=2"], 50),
        (["local.epochs=2", "local.max_steps=30"], 30),
        (["local.epochs=1", "local.max_steps=30"], 25),
        (['schedule.local.max_steps={kind="list", values=[5, 40, 10]}'], 40),
        (["local.max_steps=40", 'schedule.local.max_steps={kind="linear", end=10}'], 40),
    ],
)
def test_a_use_costs_the_most_steps_that_a_training_may_have(local: list[str], steps: int) -> None:
    assert rules_of(run_with([*local, "privacy.noise_multiplier=3.0"])).cost == steps


def test_the_sites_get_the_terms_and_read_the_same_ones() -> None:
    config = with_noise(run_with([STEPS, "privacy.epsilon=1.0"]))
    given = Given.read(config.given)
    terms = PrivateTerms.read(given.private)
    assert terms is not None
    assert (terms.sample_rate, terms.clip_norm, terms.delta) == (0.04, 1.0, 1e-5)
    assert terms.noise_multiplier == rules_of(config).noise_multiplier
    assert given.private.keys() >= {"epsilon", "participations_max"}, "what a site approves"
    more = changed(config, ["privacy.epsilon=1.5"], version=3)
    assert more.local_text != config.local_text, "another budget is approved again"
    assert rules_of(more).noise_multiplier == rules_of(config).noise_multiplier
    for key, value in (("sample_rate", 0.03), ("clip_norm", 9.0)):
        with pytest.raises(ConfigError, match=f"privacy.{key}: fixed for the life of a run"):
            changed(config, [f"privacy.{key}={value}"], version=3)


def test_steps_that_are_under_way_in_an_asynchronous_run_are_not_charged_as_fewer() -> None:
    cohort = {"round.cohort_size=4"}
    text = [*(set(PRIVATE) - cohort), STEPS, NOISY, 'round.mode="fedbuff"']
    config = load_text(RunFile, 'task = "m:t"', text, name="run.toml").run
    with pytest.raises(ConfigError, match="got 5 steps in a training, and an update of 15 may be under way"):
        changed(config, ["local.max_steps=5"], version=3)
    more = "got 20 steps in a training, and a restored backup would charge 15; allowed: 15 steps, or another run"
    with pytest.raises(ConfigError, match=more):
        changed(config, ["local.max_steps=20"], version=3)
    assert rules_of(changed(config, ["privacy.epsilon=9.0"], version=3)).cost == 15


def test_no_resume_raises_what_a_backup_of_before_it_would_charge() -> None:
    config = with_noise(run_with([STEPS, NOISY]))
    assert rules_of(changed(config, ["local.max_steps=5"], version=3)).cost == 5
    more = r"got 20 steps in a training, and a restored backup would charge 15; allowed: 15 steps or fewer"
    with pytest.raises(ConfigError, match=more):
        changed(config, ["local.max_steps=20"], version=3)
    clients = ["privacy.epsilon=8.0", "privacy.delta=1e-6", "privacy.clip_norm=1.0", 'privacy.noise_by="clients"']
    clients += ["round.cohort_size=8", "round.quorum=6", "secure.clip_norm=1.0", 'aggregation.weighting="uniform"']
    sums = with_noise(load_text(RunFile, 'task = "m:t"', clients, name="run.toml").run)
    with pytest.raises(ConfigError, match="got 5, and each is charged, of which a restored backup would charge 3"):
        changed(sums, ["secure.attempts=5"], version=3)
    assert changed(sums, ["secure.attempts=2"], version=3).rules.charges_max == 2


def test_sites_are_told_of_a_guarantee_for_clients_what_their_budgets_charge() -> None:
    others = ["privacy.epsilon=8.0", "privacy.delta=1e-6", "privacy.clip_norm=1.0", 'aggregation.weighting="uniform"']
    config = load_text(RunFile, 'task = "m:t"', [*others, "round.cohort_size=4"], name="run.toml").run
    spending = spending_of(config.local_text)
    [steps] = spending.steps
    assert config.rules.privacy is not None
    assert (spending.unit, steps.noise_multiplier) == ("client", config.rules.privacy.noise_multiplier)
    assert Given.read(config.given).private == {}, "no training changes by it"
    of_examples = spending_of(run_with([STEPS, NOISY]).local_text)
    assert (of_examples.unit, of_examples.noise_by) == ("example", "site")
    assert of_examples.steps == (Steps(3.0, 0.04, 15),)


def test_the_rules_survive_their_encoding_and_the_coordinator_adds_no_noise() -> None:
    config = run_with([STEPS, NOISY])
    assert decode_rules(encode_rules(config.rules), where="") == config.rules
    assert private_of(config, bytes(32)) is None
    assert config.rules.keep_sites > 0, "metrics of test data may be kept"


FREE = [
    'aggregation.weighting="examples"',
    'aggregation.rule="median"',
    "aggregation.norm_bound=1.0",
    'round.mode="fedbuff"',
    'round.partial_work="scaled"',
    "evaluation.clients_every=1",
    'cohort.sampler="weighted"',
    'aggregation.codec="qsgd8"',
    "local.keep_optimizer=true",
]


@pytest.mark.parametrize("override", FREE)
def test_what_comes_after_the_noise_of_the_sites_is_free(override: str) -> None:
    cohort = {"round.cohort_size=4"} if "fedbuff" in override else set()
    load_text(RunFile, 'task = "m:t"', [*(set(PRIVATE) - cohort), STEPS, NOISY, override], name="run.toml")


def test_secure_sums_go_with_it() -> None:
    config = run_with([STEPS, NOISY, "secure.clip_norm=1.0", "secure.examples_max=100", "round.quorum=4"])
    assert config.rules.secure is not None
    assert config.rules.privacy is not None


ALONE = {
    'aggregation.algorithm="fednova"': "aggregation.algorithm",
    "aggregation.partial=true": "aggregation.partial",
    'cohort.sampler="oort"': "cohort.sampler",
    'program.main="m:f"': "program.main",
    'privacy.noise_by="coordinator"': "privacy.noise_by",
    'round.late="next_round"': "round.late",
    "privacy.noise_multiplier=0.1": "privacy.noise_multiplier: got 0.1, and with [privacy] one training of 15 steps",
}


@pytest.mark.parametrize("override", ALONE)
def test_what_does_not_go_with_it_is_refused(override: str) -> None:
    faults = faults_of([STEPS, *([] if override.startswith("privacy.noise_m") else [NOISY]), override])
    assert any(fault.startswith(ALONE[override]) for fault in faults), faults
    assert all(" allowed" in fault for fault in faults)


def test_a_flower_app_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a Flower app, and with"):
        load_text(RunFile, 'task = "shop/pyproject.toml:app"', [*PRIVATE, STEPS, NOISY], name="run.toml")


def test_steps_that_nobody_names_cannot_be_accounted() -> None:
    [fault] = faults_of([])
    assert fault.startswith("local.max_steps: missing")


@pytest.mark.parametrize(
    "values",
    [{"unit": "example"}, {"unit": "client", "sample_rate": 0.1}],
)
def test_a_centralized_training_says_the_same_of_what_the_unit_lacks(values: dict[str, object]) -> None:
    mine = [f"privacy.{key}={value!r}".replace("'", '"') for key, value in values.items()]
    others = ["privacy.epsilon=8.0", "privacy.delta=1e-5", "privacy.clip_norm=1.0", "round.cohort_size=4"]
    faults = faults_of([*mine, STEPS, NOISY, 'aggregation.weighting="uniform"'], of=others)
    rest = {"epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0}
    with pytest.raises(ValueError, match=r"privacy\.") as caught:
        PrivacyConfig(**({**rest, **values} if values["unit"] == "example" else {"sample_rate": 0.1}))  # type: ignore[arg-type]
    assert faults == str(caught.value).split("; ")


@pytest.mark.skipif(not loss_distribution.is_installed(), reason="needs the extra `privacy`")
def test_a_use_that_the_quick_bound_does_not_allow_is_found_by_the_account() -> None:
    """Little noise: the bound of one use is above the budget that the account spends after three."""
    little = ["privacy.sample_rate=0.03", "privacy.delta=1e-4", "privacy.noise_multiplier=0.44518"]
    rules = rules_of(run_with(["rounds=3", "local.max_steps=6", *little]))
    assert rules.spent_max == 18
    assert 7.9 < rules.epsilon_last <= 8.0

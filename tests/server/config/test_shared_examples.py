"""The table `[privacy]` with `unit = "example"` and noise by the clients: its rules and terms, and what it excludes."""

from collections.abc import Sequence

import pytest

from atoll.client.policy.shared_noise import fault_of_shares
from atoll.protocol.privacy.poisson_account import PoissonAccount
from atoll.protocol.secure.privacy_terms import PrivacyTerms, read_privacy
from atoll.protocol.settings import ConfigError, load_text
from atoll.server.config.run import RunConfig, RunFile
from atoll.server.config.run_changes import changed, with_noise
from atoll.server.folding.reducer import private_of
from atoll.server.hosting.secure_terms import privacy_terms
from atoll.server.journal.codec import decode_rules, encode_rules
from atoll.server.rounds.privacy_rules import SharedExampleRules
from atoll.task.given import Given
from atoll.tensors.secure.vector import share_of_noise
from atoll.training.private.local_steps import PrivateTerms
from tests.server.sessions.small_federation import terms_of

SHARED = (
    'privacy.unit="example"',
    'privacy.noise_by="clients"',
    "privacy.epsilon=1.0",
    "privacy.delta=1e-5",
    "privacy.clip_norm=1.0",
    "privacy.sample_rate=0.1",
    "privacy.batch=36",
    "privacy.noise_multiplier=2.5",
    "secure.clip_norm=1.0",
    "round.cohort_size=4",
    "round.quorum=3",
    "aggregation.weighting=uniform",
    "local.max_steps=1",
    "rounds=20",
)


LR_SCHEDULE = 'schedule.local.lr={kind = "cosine", start = 0.1, end = 0.01}'


def run_with(*overrides: str, without: str = " ") -> RunConfig:
    given = [each for each in SHARED if not each.startswith(without)]
    return load_text(RunFile, 'task = "m:t"', [*given, *overrides], name="run.toml").run


def faults_of(*overrides: str, without: str = " ") -> Sequence[str]:
    with pytest.raises(ConfigError) as caught:
        run_with(*overrides, without=without)
    return [fault.removeprefix("run.toml: ").removeprefix("--set: ") for fault in caught.value.faults]


def shared_rules(config: RunConfig) -> SharedExampleRules:
    rules = config.rules.privacy
    assert isinstance(rules, SharedExampleRules)
    return rules


def test_the_noise_of_a_sum_is_that_of_one_step_over_the_batch() -> None:
    config = run_with()
    rules, sums = shared_rules(config), config.rules.secure
    assert sums is not None
    assert (rules.honest_min, rules.colluders, rules.sum_min, sums.sum_min) == (2, 1, 3, 3)
    assert sums.share == share_of_noise(32, 2.5 / 36, 2)
    assert sums.is_private
    assert (rules.cost, rules.noise_by, rules.hides_clients) == (1, "clients", False)
    assert decode_rules(encode_rules(config.rules), where="the rules") == config.rules
    plan = private_of(config, bytes(32))
    assert plan is not None
    assert plan.rules == rules


def test_a_round_costs_one_step_of_all_that_the_rounds_have() -> None:
    config = run_with()
    rules = shared_rules(config)
    account = PoissonAccount(0.1, 1e-5)
    assert rules.spent_max == 20
    assert rules.epsilon_of(20) == pytest.approx(account.epsilon_of(2.5, 20), rel=1e-9)
    sentence = rules.guarantee(20, 20).sentence
    assert "20 steps, in each of which every example takes part with probability 0.1" in sentence
    assert "the clients add the noise inside their secure sums, so that it holds against the coordinator" in sentence
    assert "the noise of any 2 of them suffices" in sentence


def test_the_least_noise_for_all_rounds_allows_all_of_them_also_when_the_stored_run_is_read() -> None:
    first = run_with(without="privacy.noise_multiplier")
    assert shared_rules(first).spent_max == 20
    again = shared_rules(with_noise(first))
    assert (again.spent_max, again.epsilon_last) == (20, shared_rules(first).epsilon_last)
    assert again.epsilon_last <= 1.0


def test_the_sites_are_told_what_the_sum_has_and_refuse_one_with_less() -> None:
    config = run_with()
    told = PrivateTerms.read(Given.read(config.given).private)
    assert told == PrivateTerms(0.1, 1.0, 2.5, 1e-5, batch=36.0, bits=32)
    found = privacy_terms(config)
    assert found == PrivacyTerms("example", "clients", 1.0, 1e-5, 2.5 / 36, 20, 4, 2, 1)
    assert read_privacy(found.text()) == found
    secure = terms_of(privacy=found.text(), examples_max=0)
    assert fault_of_shares(config.local_text, secure) == ""


@pytest.mark.parametrize(
    ("given", "without", "fault"),
    [
        ((), "privacy.batch", "privacy.batch: missing"),
        ((), "secure", 'privacy.noise_by: got "clients", and with [privacy] the clients add their shares of the noise'),
        (("local.max_steps=3",), " ", "local.max_steps: got 3, and with [privacy] the clients share the noise of one"),
        (("local.lr=0.1",), " ", "local.lr: got a value, and with privacy.unit"),
        (("local.keep=head.*",), " ", "local.keep: got a value, and with privacy.unit"),
        ((LR_SCHEDULE,), " ", "local.lr: got a value"),
        (("secure.clip_norm=2.0",), " ", "secure.clip_norm: got 2.0, and with [privacy] each site clips its update"),
        (("privacy.batch=1e6",), " ", "privacy.noise_multiplier: one member's noise has a standard deviation of"),
        (("privacy.batch=1e-3",), " ", "privacy.noise_multiplier: 4 members in words of 32 bits"),
        (("privacy.colluders=3",), " ", "privacy.colluders: got 3, and with [privacy] 3 of the 4 members"),
        (("aggregation.norm_bound=4.0",), " ", "aggregation.norm_bound: got 4.0"),
        (("secure.metrics.loss=2",), " ", "secure.metrics: got"),
        (('privacy.noise_by="site"',), " ", "privacy.batch: got 36: without"),
        (('privacy.noise_by="coordinator"',), " ", 'privacy.noise_by: got "coordinator", and with privacy.unit'),
    ],
)
def test_what_does_not_go_with_it_is_one_sentence(given: Sequence[str], without: str, fault: str) -> None:
    assert any(each.startswith(fault) for each in faults_of(*given, without=without))


def test_all_faults_come_at_once() -> None:
    faults = faults_of("local.lr=0.1", "secure.clip_norm=2.0", "aggregation.rule=median", "evaluation.clients_every=1")
    starts = ("local.lr", "secure.clip_norm", "aggregation.rule", "evaluation.clients_every")
    assert {start for start in starts if any(fault.startswith(start) for fault in faults)} == {*starts}


def test_each_site_adding_its_noise_has_no_colluders() -> None:
    given = ('privacy.noise_by="site"', "privacy.honest_min=2")
    [fault] = faults_of(*given, without="privacy.batch")
    assert fault.startswith("privacy.honest_min: got 2, and with [privacy] each site adds the noise of its steps")


@pytest.mark.parametrize("change", ["privacy.batch=40", "privacy.sample_rate=0.2"])
def test_a_run_keeps_its_mechanism(change: str) -> None:
    with pytest.raises(ConfigError, match=change.split("=")[0]):
        changed(run_with(), [change], version=1)

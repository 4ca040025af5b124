"""Simulated secure sums: without masks they end with the bits and records of real sessions, whoever drops out."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.client.secure.promises import Kind, Promise
from atoll.operations.load import load_user_task
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import Fate
from atoll.simulations.federation.run import opened
from atoll.simulations.secure.cryptography import NoMasks
from tests.server.sessions.small_federation import terms_of
from tests.simulations.federation.simulating import TASK, lines, model, settings, simulate, without_real_time
from tests.simulations.secure import layered_task
from tests.simulations.secure.falling_asleep import DUTIES, SECURE, SITES, run, trace_of


def both(folder, *overrides):
    """Run both ways, compare all that they leave, and return the result and the records of the rounds."""
    fast, real = (run(folder / way, way, *overrides) for way in ("fast", "real"))
    assert fast[1] == real[1]
    assert fast[2] == real[2]
    assert without_real_time(lines(folder / "fast")) == without_real_time(lines(folder / "real"))
    assert fast[0]["model_digest"] == real[0]["model_digest"]
    return fast[0], fast[2]


def asleep(folder, seed, *overrides):
    trace = trace_of(folder, seed, clients=12)
    drowsy = ("devices.latency_s=1.5", "devices.availability=trace", f"devices.awake_trace={trace}")
    cohort = ("population.clients=12", "round.cohort_size=10", "round.quorum=3", "secure.sessions=2")
    return both(folder, f"seed={seed}", *cohort, *drowsy, *SECURE, *SITES, *overrides)


def lacking(records):
    """Return the first duty that each member of a session has not done, with its fate."""
    of_all = (client for record in records for client in record.clients.values() if client.sum is not None)
    missing = ((next((duty for duty in DUTIES if getattr(c.sum, duty) is None), ""), c.fate) for c in of_all)
    return {pair for pair in missing if pair[0]}


@pytest.mark.slow
def test_sums_without_masks_end_as_real_ones_whoever_drops_out(tmp_path):
    (tmp_path / "64").mkdir()
    (tmp_path / "32").mkdir()
    result, wide = asleep(tmp_path / "64", 0, "rounds=4", "secure.bits=64")
    _, narrow = asleep(tmp_path / "32", 1, "rounds=4")
    assert result["version"] == 4
    gone = lacking(wide + narrow)
    assert {"keys_at", "shares_at", "masked_at", "signed_at", "revealed_at"} == {duty for duty, _ in gone}
    assert {fate for _, fate in gone} >= {Fate.FAILED, Fate.STRAGGLER, Fate.REPORTED}
    assert max(each.attempt for record in wide + narrow for each in record.sums) >= 2
    assert {record.phase for record in wide + narrow} == {"committed", "abandoned"}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_sums_without_masks_end_as_real_ones_with_other_seeds(tmp_path, seed):
    asleep(tmp_path, seed, "rounds=6", f"secure.bits={(32, 64)[seed % 2]}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("aggregation.rule=median", "secure.sessions=3"),
        ("aggregation.weighting=uniform", "optimizer.name=fedadam", "secure.bits=64"),
        ("secure.metrics.accuracy=2", "local.prox_mu=0.1", "devices.stragglers=0.4", "round.linger=0.1"),
    ],
)
def test_rules_weights_metrics_and_stragglers(tmp_path, overrides):
    weights = () if "aggregation.weighting=uniform" in overrides else ("secure.examples_max=8",)
    given = ("rounds=3", "population.clients=12", "round.cohort_size=10", "round.quorum=3", "round.deadline=60")
    result, records = both(tmp_path, *given, "population.kind=iid", "secure.clip_norm=0.5", *weights, *overrides)
    assert result["version"] == 3
    assert all(record.sums for record in records)
    accuracies = [line["train"].get("accuracy") for line in lines(tmp_path / "fast")]
    assert all(accuracy is None for accuracy in accuracies) == ("secure.metrics.accuracy=2" not in overrides)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "tensors"), [("normed", 9), ("adapted", 2)])
def test_integer_tensors_and_models_of_which_only_a_part_travels(tmp_path, task, tensors):
    task = f"{Path(layered_task.__file__)}:{task}"
    fast, real = (run(tmp_path / w, w, "rounds=2", "round.cohort_size=4", *SECURE, task=task) for w in ("fast", "real"))
    assert fast[1] == real[1]
    values = model(tmp_path / "fast", 2)
    assert len(values) == tensors
    plain = run(tmp_path / "plain", "fast", "rounds=2", "round.cohort_size=4", task=task)
    assert plain[1] != fast[1]
    assert {name: value.dtype for name, value in model(tmp_path / "plain", 2).items()} == {
        name: value.dtype for name, value in values.items()
    }


def test_every_record_says_that_a_session_was_simulated_and_tells_no_single_client(tmp_path):
    result, found = simulate(tmp_path, "rounds=2", "round.cohort_size=4", "seed=5", *SECURE)
    assert result["secure"] == "simulated"
    for line in found:
        assert line["secure"] == "simulated"
        assert line["sums"] == [{"session": 0, "members": 4, "attempt": 1, "stage": "opened"}]
        assert line["train"].keys() == {"loss"}
        assert line.keys().isdisjoint({"train_values", "client_values"})
        assert line["steps"] == {}


@pytest.mark.parametrize("is_asleep", [False, True])
def test_metrics_of_clients_are_added_in_sums_and_equal_those_of_a_plain_run(tmp_path, is_asleep):
    every = ("evaluation.clients_every=1", "secure.metrics.accuracy=2")
    if is_asleep:
        asleep(tmp_path, 3, *every)
        measured = [line["clients"] for line in lines(tmp_path / "fast") if line["clients"]]
        assert any(measured)
        return
    run_of_two = ("rounds=2", "round.cohort_size=4", "seed=5", "aggregation.weighting=uniform")
    both(tmp_path, *run_of_two, "secure.clip_norm=100", "secure.bits=64", *every)
    _, plain = simulate(tmp_path / "plain", *run_of_two, every[0])
    found = lines(tmp_path / "fast")
    for line, expected in zip(found, plain, strict=True):
        assert line["clients"] == pytest.approx(expected["clients"], rel=1e-5)
    assert all(line["clients"] for line in found)
    assert not [line for line in found if line.get("client_values")], "no metric of a single client is known"


def test_the_ranges_follow_the_sums(tmp_path):
    _, _, records = run(
        tmp_path, "fast", "rounds=4", "round.cohort_size=4", "secure.clip_norm=300", "secure.examples_max=20"
    )
    first, *_, last = [record.ranges for record in records]
    assert all(exponent == -3 for exponent in first)  # all values were below 1/64 of the clip's bound
    assert all(exponent < -3 for exponent in last)


def test_an_interrupted_run_ends_as_an_undisturbed_one(tmp_path):
    given = ("rounds=4", "round.cohort_size=4", "seed=5", *SECURE)
    whole, _ = simulate(tmp_path / "whole", *given)
    parts = [simulate(tmp_path / "parts", f"rounds={rounds}", *given[1:])[0] for rounds in (1, 2, 4)]
    assert parts[-1]["model_digest"] == whole["model_digest"]
    assert all(a["version"] < b["version"] for a, b in pairwise(parts))


OVER_THE_BOUND = ("attack.kind=scaled_flip", "attack.factor=1000", "attack.malicious=1")


def test_sites_sign_no_third_sum_from_one_version(tmp_path):
    """The only session is beyond its bound in each round, so that no version comes."""
    given = ("rounds=1", "round.cohort_size=4", "round.failure_rest=0", "round.retry_wait=0.1", *SECURE)
    result, found = simulate(tmp_path, *given, *OVER_THE_BOUND)
    assert (result["state"], result["version"]) == ("failed", 0)
    details = [line["detail"] for line in found]
    assert all("session 0, its norm is" in detail for detail in details[:2])
    assert "this site has signed 2 sums from version 0" in found[2]["failures"]["a"]


def test_what_sites_have_signed_is_part_of_a_snapshot():
    before = NoMasks()
    for name, version in (("a", "old"), ("a", "new"), ("b", "new"), ("b", "new"), ("c", "old")):
        before.keep(name, Promise(Kind.SIGNED, "run-1", "update", 1, 1, 0, version))
    assert before.signed("new") == {"a": 1, "b": 2}
    after = NoMasks()
    after.restore(before.signed("new"), "run-1", "new")
    assert after.signed("new") == {"a": 1, "b": 2}
    terms = terms_of(run="run-1", round=9, model="new")
    assert after.promises("a").fault(terms) == ""
    assert "has signed 2 sums" in after.promises("b").fault(terms)


@pytest.mark.parametrize("way", ["fast", "real"])
def test_only_the_session_of_a_site_that_ignores_the_bound_is_dropped_and_it_is_named(tmp_path, way):
    given = ("rounds=1", "population.clients=12", "population.kind=iid", "round.cohort_size=12", "round.quorum=3")
    overrides = (*given, "secure.sessions=3", f"simulation.secure={way}", *SECURE)
    result, (line,) = simulate(tmp_path, *overrides, *OVER_THE_BOUND)
    assert (result["state"], result["malicious"], line["counted"]) == ("finished", line["malicious"], 12)
    dropped = [each for each in line["sums"] if each.get("dropped")]
    assert [each["detail"].partition(" is")[0] for each in dropped] == ["its norm"]


@pytest.mark.parametrize("kind", ["sign_flip", "gaussian", "alie", "ipm", "free_rider", "backdoor", "label_flip"])
def test_malicious_sites_that_keep_the_bound_are_not_found(tmp_path, kind):
    given = ("rounds=2", "round.cohort_size=4", "attack.malicious=2", "attack.keeps_bound=true", *SECURE)
    result, found = simulate(tmp_path, f"attack.kind={kind}", *given)
    honest, _ = simulate(tmp_path / "honest", *given[:2], *SECURE)
    assert result["model_digest"] != honest["model_digest"]
    assert not any(each.get("dropped") for line in found for each in line["sums"])


def test_sessions_need_names_that_certificates_can_have(tmp_path):
    task = load_user_task(TASK)
    names = tuple(f"site {site}" for site in task.sites)
    odd = replace(task, sites=names, data=lambda site, split: task.data(site.removeprefix("site "), split))
    file = settings("rounds=1", "round.cohort_size=4", *SECURE)
    with pytest.raises(ConfigError, match=r"secure: got the clients 'site a', .*, whose names a session refuses"):
        with opened(file, odd, tmp_path, on_round=lambda line: None, is_fresh=False):
            pass


@pytest.mark.slow
def test_private_sums_have_the_same_noise_and_charges_both_ways(tmp_path):
    """The noise of the clients follows from the run's seed, and every number of the two ways is the same."""
    trace = trace_of(tmp_path, 0, clients=12)
    drowsy = ("devices.latency_s=1.5", "devices.availability=trace", f"devices.awake_trace={trace}")
    cohort = ("population.clients=12", "round.cohort_size=10", "round.quorum=7", "aggregation.weighting=uniform")
    private = ("privacy.epsilon=8.0", "privacy.delta=1e-5", "privacy.clip_norm=0.5", "privacy.noise_by=clients")
    given = (*cohort, *drowsy, *private, "secure.clip_norm=0.5", "rounds=3", "secure.stage_timeout=6")
    _, records = both(tmp_path, *given, *SITES)
    charges = [record.charge for record in records if record.charge is not None]
    assert [charge.charges for charge in charges] == [charge.clients for charge in charges]
    assert charges[-1].epsilon > charges[0].epsilon > 0


@pytest.mark.slow
def test_shared_noise_of_examples_is_the_same_both_ways(tmp_path):
    """One step a round: fast and real sessions have one model, a charge of a step each, and noise in every sum."""
    trace = trace_of(tmp_path, 0, clients=12)
    drowsy = ("devices.latency_s=1.5", "devices.availability=trace", f"devices.awake_trace={trace}")
    cohort = ("population.clients=12", "round.cohort_size=10", "round.quorum=7", "aggregation.weighting=uniform")
    mechanism = ("privacy.sample_rate=0.5", "privacy.noise_multiplier=2.0", "privacy.batch=4", "privacy.clip_norm=0.5")
    private = ("privacy.unit=example", "privacy.noise_by=clients", "privacy.epsilon=8.0", "privacy.delta=1e-3")
    sums = ("secure.clip_norm=0.5", "rounds=3", "secure.stage_timeout=6", "local.max_steps=1", "optimizer.lr=0.1")
    result, records = both(tmp_path, *cohort, *drowsy, *mechanism, *private, *sums, *SITES)
    charges = [record.charge for record in records if record.charge is not None]
    assert [charge.charges for charge in charges] == [charge.clients for charge in charges], "no attempt is repeated"
    assert charges[-1].epsilon > charges[0].epsilon > 0
    assert (result["privacy"]["unit"], result["privacy"]["noise_by"]) == ("example", "clients")
    assert result["privacy"]["uses"] <= 3

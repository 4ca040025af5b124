"""Simulated runs that keep their best version and end early."""

from pathlib import Path

import pytest

from atoll.protocol.settings import ConfigError
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import lines, model, settings, simulate, without_real_time
from tests.simulations.federation.test_interrupting import interrupted

NO_TEST_DATA = str(Path(line_task.__file__)) + ":no_test_data"
UNDEFINED = str(Path(line_task.__file__)) + ":undefined"
COHORT = ("round.cohort_size=2", "local.lr=0.6", "seed=4")
STOP = (*COHORT, "rounds=40", "stop.metric=loss", "stop.patience=2", "model.best=loss")
CLIENTS = ("evaluation.server_every=0", "evaluation.clients_every=1", "stop.source=clients", "model.source=clients")


def best_by_hand(found, source):
    """Return the first of the smallest losses, and the version at which two later ones were not smaller."""
    best, since = (0, float("inf")), 0
    for line in found:
        loss = line[source]["loss"]
        since += 1
        if loss < best[1]:
            best, since = (line["version"], loss), 0
        if since == 2:
            return best, line["version"]
    return best, 0


@pytest.mark.parametrize(
    ("overrides", "source"), [(STOP, "server"), ((*STOP, *CLIENTS), "clients")], ids=["server", "clients"]
)
def test_a_run_ends_early_and_keeps_its_best_version(tmp_path, overrides, source):
    result, found = simulate(tmp_path, *overrides)
    (version, loss), end = best_by_hand(found, source)
    assert 0 < version < end < 40
    assert (result["state"], result["version"]) == ("finished", end)
    assert result["cause"].startswith(f"early stop: loss ({source}) has not improved in 2 evaluations")
    assert result["best"] == {"version": version, "metric": "loss", "source": source, "value": loss}
    assert model(tmp_path, version).keys() == model(tmp_path, end).keys()


def test_the_rounds_until_the_end_are_those_of_a_run_without_a_stop(tmp_path):
    result, found = simulate(tmp_path / "stopped", *STOP)
    whole, lines_of_whole = simulate(tmp_path / "whole", *COHORT, f"rounds={result['version']}")
    assert result["model_digest"] == whole["model_digest"]
    assert without_real_time(found) == without_real_time(lines_of_whole)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [STOP, (*STOP, *CLIENTS)], ids=["server", "clients"])
def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path, overrides):
    whole, told = simulate(tmp_path / "whole", *overrides)
    for after in range(1, whole["version"]):
        interrupted(tmp_path / "parts", overrides, after)
    result, found = simulate(tmp_path / "parts", *overrides)
    assert (result["model_digest"], result["best"]) == (whole["model_digest"], whole["best"])
    assert without_real_time(found) == without_real_time(told)
    assert model(tmp_path / "parts", result["best"]["version"])


def test_a_run_that_ended_early_stays_finished(tmp_path):
    result, _ = simulate(tmp_path, *STOP)
    again, found = simulate(tmp_path, *STOP)
    assert (again["version"], again["cause"]) == (result["version"], result["cause"])
    more, _ = simulate(tmp_path, *STOP, "rounds=60")  # a run of 60 rounds would have ended there, too
    assert (more["version"], more["cause"]) == (result["version"], result["cause"])
    assert len(lines(tmp_path)) == len(found) == result["version"]


def test_as_many_versions_stay_as_the_run_keeps(tmp_path):
    simulate(tmp_path, *COHORT, "rounds=12", "model.keep_versions=8")
    kept = {int(path.name[:6]) for path in (tmp_path / "models" / "versions").glob("*.safetensors")}
    assert kept == {0, *range(5, 13)}


@pytest.mark.parametrize("mode", ["fedbuff", "fedasync"])
def test_an_asynchronous_run_ends_early_too(tmp_path, mode):
    speeds = "devices.examples_per_s={low=1,high=30}"
    overrides = (f"round.mode={mode}", "round.concurrency=3", speeds, "round.deadline=600.0", "local.lr=0.6")
    overrides += ("rounds=40", "stop.metric=loss", "stop.patience=2", "model.best=loss")
    overrides += ("round.buffer_size=2",) if mode == "fedbuff" else ()
    result, found = simulate(tmp_path, *overrides)
    (version, loss), end = best_by_hand(found, "server")
    assert (result["version"], result["best"]["version"], result["best"]["value"]) == (end, version, loss)
    account = result["invitations"]
    assert account.pop("invited") == sum(account.values())


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("model.best=auroc", "model.best: got 'auroc'; allowed: accuracy, loss"),
        ("stop.metric=f1", "stop.metric: got 'f1'"),
    ],
)
def test_a_metric_that_the_task_lacks_is_refused_before_the_first_round(tmp_path, override, fault):
    patience = ("stop.patience=2",) if override.startswith("stop") else ()
    with pytest.raises(ConfigError, match=fault):
        simulate(tmp_path, *COHORT, "rounds=3", override, *patience)
    assert not (tmp_path / "rounds.jsonl").exists()
    assert settings(*COHORT).model.best == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices",
    [(), ("devices.availability=daily", "devices.awake_hours=23.0", "round.retry=100")],
    ids=["always there", "that come and go"],
)
def test_a_run_that_pauses_itself_is_over_in_a_simulation(tmp_path, devices):
    """Nobody resumes it: with clients that come and go it would go on for ever."""
    watched = ("rounds=3", "model.best=loss", "model.source=clients", "evaluation.clients_every=1")
    for _ in range(2):  # also when the command is repeated
        result, found = simulate(tmp_path, *COHORT, *watched, *devices, task=NO_TEST_DATA)
        assert result["state"] == "paused"
        assert result["cause"].startswith("model.best: the clients could not measure version 1")
        assert result["version"] == len([line for line in found if line["version"]]) == 1


@pytest.mark.parametrize("source", ["server", "clients"])
def test_a_metric_that_never_has_a_value_is_named_at_the_end(tmp_path, source):
    """A task may leave a metric undefined, as an AUROC of one class; a run of which no version has one says so."""
    watched = {"model.best": "auroc", "model.source": source, "stop.metric": "auroc", "stop.source": source}
    overrides = [f"{key}={value}" for key, value in watched.items()]
    every = ("stop.patience=1", "evaluation.clients_every=1", "rounds=2")
    result, _ = simulate(tmp_path, *COHORT, *overrides, *every, task=UNDEFINED)
    assert (result["state"], result["version"], "best" in result) == ("finished", 2, False)
    assert result["undecided"] == [
        f"{key} has decided nothing: auroc ({source}) never had a value" for key in ("model.best", "stop.metric")
    ]

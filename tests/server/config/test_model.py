"""The settings of versions and of an early stop: their faults, their defaults, their change at a resume."""

import pytest

from atoll.protocol.settings import ConfigError, load_text
from atoll.server.config.model import faults_of_metrics
from atoll.server.config.run import RunConfig
from atoll.server.config.run_changes import are_equal, changed, changes_of, differing_keys, with_number_of_versions
from atoll.server.rounds.run_rules import EarlyStop, WatchedMetric
from atoll.training.worker.bench import Measures

EVERY = "evaluation.clients_every=1"


def config(*overrides: str) -> RunConfig:
    return load_text(RunConfig, 'task = "a:b"', overrides, name="run.toml")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["model.mode=min"], "model: mode without best has no effect: set best, or leave it out"),
        (["stop.patience=3", "stop.source=clients"], "stop: source, patience without metric has no effect"),
        (["stop.metric=auc"], "stop: metric 'auc' never ends the run: set patience, target, or both"),
        (["stop.metric=auc", "stop.min_delta=1.0", "stop.target=1.0"], "stop: min_delta needs patience"),
        (
            ["model.best=auc", "model.source=clients"],
            "model: best 'auc' is measured by evaluation.clients_every, which is 0: set it to 1 or more, or "
            "source = 'server'",
        ),
        (
            ["stop.metric=auc", "stop.patience=1", "evaluation.server_every=0"],
            "stop: metric 'auc' is measured by evaluation.server_every, which is 0: set it to 1 or more",
        ),
        (["model.keep_versions=0"], "model.keep_versions: got 0; allowed: integer >= 1, <= 1000000"),
        (["model.best=auc", "model.mode=largest"], 'model.mode: got \'largest\'; allowed: "max" | "min"'),
    ],
)
def test_what_decides_nothing_is_refused(overrides: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(*overrides)
    assert fault in str(refused.value)


def test_a_loss_is_better_when_it_is_smaller() -> None:
    rules = config("model.best=loss", "stop.metric=auroc", "stop.source=clients", "stop.target=0.9", EVERY).rules
    assert rules.best == WatchedMetric("loss", "server", "min")
    assert rules.stop == EarlyStop(WatchedMetric("auroc", "clients", "max"), target=0.9)
    assert config("model.best=loss", "model.mode=max").rules.best == WatchedMetric("loss", "server", "max")


@pytest.mark.parametrize(
    ("measures", "faults"),
    [
        (Measures(("accuracy", "auc", "loss")), []),
        (Measures(None), []),
        (Measures(("accuracy", "loss")), ["model.best: got 'auc'; allowed: accuracy, loss"]),
        (
            Measures(("auc",), "the task has no test_data"),
            [
                "model.best: got 'auc' of the server, and the task has no test_data; "
                'allowed: model.source = "clients" with evaluation.clients_every'
            ],
        ),
        (
            Measures((), "the task has no `evaluate`"),
            ["model.best: got 'auc'; allowed: none, as the task measures nothing"],
        ),
    ],
)
def test_a_metric_that_the_task_lacks_is_named(measures: Measures, faults: list[str]) -> None:
    found = config("model.best=auc")
    assert [*faults_of_metrics(found.model, found.stop, measures)] == faults


def test_the_number_of_versions_belongs_to_the_run() -> None:
    begun = with_number_of_versions(config(), 7)
    assert begun.model.keep_versions == 7
    assert with_number_of_versions(config("model.keep_versions=2"), 7).model.keep_versions == 2
    assert are_equal(begun, config())  # the same file again
    assert differing_keys(begun, config("model.keep_versions=8")) == ["model.keep_versions"]
    assert differing_keys(begun, config("rounds=3")) == ["rounds"]


def test_changes_are_named_one_by_one_with_both_values() -> None:
    one, other = config("local.lr=0.1", "local.epochs=2"), config("local.lr=0.01", "rounds=3", "model.best=loss")
    assert changes_of(one, other) == {
        "rounds": (10, 3),
        "local.lr": (0.1, 0.01),
        "local.epochs": (2, None),
        "model.best": ("", "loss"),
    }
    assert changes_of(one, one) == {}


def test_a_resume_with_several_impossible_changes_lists_all_of_them() -> None:
    wrong = ["round.quorum=many", "seed=9", "rounds=2", "local.nonsense.key", "model.best=loss", "round.mode=fedasync"]
    with pytest.raises(ConfigError) as error:
        changed(config(), wrong, version=3)
    text = "\n".join(error.value.faults)
    for words in (
        "round.quorum",
        "seed: fixed for the life of a run",
        "rounds: got 2; 3 versions are",
        "nonsense",
        "round.mode: fixed",
    ):
        assert words in text, text
    with pytest.raises(ConfigError) as error:
        changed(config(), ["coordinator.max_runs=9", "coordinator.listen=x", "seed=9"], version=30)
    faults = [fault.removeprefix("--set: ").partition(":")[0] for fault in error.value.faults]
    assert faults == ["seed", "rounds", "coordinator.max_runs", "coordinator.listen"]
    assert "rounds: is 10, and 30 versions are committed already" in error.value.faults[1]
    assert "evaluation, model, stop, task's options; a new run" in error.value.faults[0]
    with pytest.raises(ConfigError) as error:
        changed(config(), ["rounds=many", "seed=9"], version=30)
    assert len(error.value.faults) == 2, "the rounds are named once"


def test_a_resume_may_change_them() -> None:
    new = changed(
        config(), ["model.keep_versions=9", "model.best=loss", "stop.metric=loss", "stop.patience=4"], version=3
    )
    assert (new.model.keep_versions, new.rules.best) == (9, WatchedMetric("loss", "server", "min"))
    assert new.rules.stop == EarlyStop(WatchedMetric("loss", "server", "min"), 4)

"""The decisions of a run by its metrics: the best version, an early stop, and what cannot be measured."""

from collections.abc import Mapping

import pytest

from atoll.protocol.vocabulary import ClientId, RunState, Version
from atoll.server.config.run import UNEVALUATED_MAX, RunConfig
from atoll.server.journal.codec import decode_ledger, encode_ledger
from atoll.server.required.keep import Keep
from atoll.server.rounds.events import (
    ClientEvaluated,
    ComputeMetrics,
    CoordinatorStarted,
    Effect,
    EndRun,
    MetricsComputed,
    ModelEvaluated,
    OpenNextRound,
    PauseRun,
    ResumeRequested,
    RoundDue,
    StopRequested,
)
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import EarlyStop, MeasuredVersion, WatchedMetric
from atoll.server.rounds.waiting import what_a_run_waits_for
from tests.server.rounds.test_cohort_round import Drive, kinds

ACCURACY = WatchedMetric("accuracy", "server", "max")
BY_CLIENTS = WatchedMetric("accuracy", "clients", "max")
STOP = EarlyStop(ACCURACY, patience=2)


def ready(rounds: int = 9, **rules: object) -> Drive:
    drive = Drive(rounds=rounds, rules={"evaluate_server_every": 1, **rules}, cohort_size=2, quorum=1, deadline=60.0)
    drive.join("ab")
    return drive


def committed(drive: Drive) -> list[Effect]:
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a")
    drive.update("b")
    return drive.fold()


def measured(drive: Drive, value: float | None, version: int = 0, name: str = "accuracy") -> list[Effect]:
    """Let the server measure a version, by default the newest."""
    number = Version(version or drive.machine.ledger.version)
    [compute, *_] = drive.do(ModelEvaluated(number, {name: (value or 0.0, 1.0)}))
    assert isinstance(compute, ComputeMetrics)
    return drive.do(MetricsComputed(number, "server", {name: value}))


def course(drive: Drive, *values: float | None) -> list[Effect]:
    effects: list[Effect] = []
    for value in values:
        committed(drive)
        effects = measured(drive, value)
    return effects


def test_the_best_version_is_the_first_of_the_best() -> None:
    drive = ready(best=ACCURACY)
    course(drive, 0.5, 0.8, 0.8, None, 0.7)
    assert drive.machine.ledger.best == MeasuredVersion(Version(2), 0.8)


def test_the_best_version_and_those_that_may_become_it_stay() -> None:
    drive = ready(best=ACCURACY)
    course(drive, 0.9, 0.5, 0.5)
    committed(drive)  # 4: not evaluated yet
    committed(drive)
    drive.do(ModelEvaluated(Version(5), {"accuracy": (1.0, 1.0)}))  # its value is not known yet
    committed(drive)
    measured(drive, 0.1, 6)
    keep = Keep.after(0, drive.machine, drive.rules.policy)
    assert keep.versions >= {1, 4, 5}
    assert not {2, 3} & keep.versions


def test_rounds_do_not_wait_for_the_best_but_wait_for_a_stop() -> None:
    assert kinds(committed(ready(best=ACCURACY))) == ["Commit", "EvaluateModel", "OpenNextRound"]
    drive = ready(stop=STOP)
    assert kinds(committed(drive)) == ["Commit", "EvaluateModel"]
    assert kinds(drive.do(ModelEvaluated(Version(1), {"accuracy": (1.0, 2.0)}))) == ["ComputeMetrics"]
    assert drive.do(MetricsComputed(Version(1), "server", {"accuracy": 0.5})) == [OpenNextRound()]


def test_rounds_wait_for_the_server_where_it_is_to_measure_every_version() -> None:
    drive = ready(rounds=4, unevaluated_max=2)
    assert "OpenNextRound" in kinds(committed(drive))
    assert "OpenNextRound" not in kinds(committed(drive))
    assert what_a_run_waits_for(drive.machine) == "version 1 is being evaluated by the server"
    assert "OpenNextRound" in kinds(drive.do(ModelEvaluated(Version(1), {})))
    assert not what_a_run_waits_for(drive.machine)
    assert "OpenNextRound" not in kinds(committed(drive))
    assert "OpenNextRound" in kinds(drive.do(ModelEvaluated(Version(2), None, "it failed")))
    committed(drive)
    drive.do(ModelEvaluated(Version(3), {}))
    assert "EndRun" in kinds(drive.do(ModelEvaluated(Version(4), {}))), "the last round has none to wait for"


def test_a_flower_app_measures_every_version() -> None:
    rules = [RunConfig(name="a", task=task).rules for task in ("m:t", "apps/one/pyproject.toml:app")]
    assert [each.unevaluated_max for each in rules] == [0, UNEVALUATED_MAX]


def test_a_stop_finishes_the_run_with_its_cause() -> None:
    drive = ready(stop=STOP, best=ACCURACY)
    effects = course(drive, 0.5, 0.6, 0.6, 0.4)
    cause = "early stop: accuracy (server) has not improved in 2 evaluations, its best is 0.6 at version 2"
    assert effects == [EndRun(RunState.FINISHED, cause)]
    assert drive.machine.ledger.best == MeasuredVersion(Version(2), 0.6)


def test_an_evaluation_without_a_value_decides_nothing() -> None:
    drive = ready(stop=EarlyStop(ACCURACY, patience=1))
    assert course(drive, 0.5, None, None) == [OpenNextRound()]
    committed(drive)
    assert drive.do(ModelEvaluated(Version(4), None, "the worker crashed")) == [OpenNextRound()]
    assert kinds(course(drive, 0.5)) == ["EndRun"]


def test_the_last_round_ends_the_run_as_without_a_stop() -> None:
    drive = ready(rounds=2, stop=EarlyStop(ACCURACY, target=0.9))
    assert course(drive, 0.5, 0.6) == [EndRun(RunState.FINISHED, "2 rounds are committed")]


def test_the_end_waits_for_the_values_of_the_best() -> None:
    drive = ready(rounds=1, best=ACCURACY)
    committed(drive)
    assert kinds(drive.do(ModelEvaluated(Version(1), {"accuracy": (1.0, 2.0)}))) == ["ComputeMetrics"]
    assert kinds(drive.do(MetricsComputed(Version(1), "server", {"accuracy": 0.5}))) == ["EndRun"]


def test_clients_decide_by_their_merged_sums() -> None:
    drive = ready(stop=EarlyStop(BY_CLIENTS, target=0.6), evaluate_server_every=0, evaluate_clients_every=1)
    committed(drive)
    drive.do(ClientEvaluated(ClientId("a"), Version(1), {"accuracy": (1.0, 2.0)}))
    effects = drive.do(ClientEvaluated(ClientId("b"), Version(1), {"accuracy": (5.0, 6.0)}))
    assert kinds(effects) == ["CloseEvaluation", "ComputeMetrics"]
    assert effects[1] == ComputeMetrics(Version(1), "clients", {"accuracy": (6.0, 8.0)})
    assert kinds(drive.do(MetricsComputed(Version(1), "clients", {"accuracy": 0.75}))) == ["EndRun"]


def test_values_of_other_data_or_of_no_request_decide_nothing() -> None:
    drive = ready(best=ACCURACY)
    committed(drive)
    assert drive.do(MetricsComputed(Version(1), "server", {"accuracy": 0.9})) == []
    assert drive.do(MetricsComputed(Version(1), "clients", {"accuracy": 0.9})) == []
    assert drive.machine.ledger.best is None


# ---------------------------------------------------------------- what cannot be measured


@pytest.mark.parametrize("rules", [{"best": ACCURACY}, {"stop": STOP}], ids=["best", "stop"])
def test_a_metric_that_is_not_measured_pauses_the_run_by_name(rules: Mapping[str, object]) -> None:
    drive = ready(**rules)
    committed(drive)
    drive.do(ModelEvaluated(Version(1), {"acuracy": (1.0, 2.0), "loss": (1.0, 2.0)}))
    [*_, effect] = drive.do(MetricsComputed(Version(1), "server", {"acuracy": 0.5, "loss": 0.5}))
    key = "model.best" if "best" in rules else "stop.metric"
    cause = f"{key}: got 'accuracy', which the server did not measure; allowed: acuracy, loss"
    if "best" in rules:  # the next round is due already: the pause takes its place when it opens
        assert drive.machine.ledger.state is RunState.PAUSED
    assert effect == PauseRun(cause)
    assert drive.do(ResumeRequested(rules=ready(best=WatchedMetric("loss", "server", "min")).rules)) == [
        OpenNextRound()
    ]


def test_data_that_cannot_be_measured_pause_the_run() -> None:
    drive = ready(best=ACCURACY, stop=STOP)
    committed(drive)
    cause = "model.best and stop.metric: the server could not measure version 1: the task has no test_data"
    assert drive.do(ModelEvaluated(Version(1), None, "the task has no test_data")) == [PauseRun(cause)]


def test_clients_without_an_answer_pause_the_run() -> None:
    drive = ready(best=BY_CLIENTS, evaluate_server_every=0, evaluate_clients_every=1)
    committed(drive)
    for client in "ab":
        effects = drive.do(ClientEvaluated(ClientId(client), Version(1), None, "this site has no such data"))
    cause = "model.best: the clients could not measure version 1: this site has no such data"
    assert effects[1:] == [PauseRun(cause)]


def test_the_last_version_ends_the_run_even_if_it_cannot_be_measured() -> None:
    drive = ready(rounds=1, best=ACCURACY)
    committed(drive)
    assert kinds(drive.do(ModelEvaluated(Version(1), None, "the task has no test_data"))) == ["EndRun"]


# ---------------------------------------------------------------- resume and restart


def test_a_run_that_ended_early_resumes_with_fresh_patience() -> None:
    drive = ready(stop=EarlyStop(ACCURACY, patience=1))
    course(drive, 0.9, 0.5)
    assert drive.machine.ledger.state is RunState.FINISHED
    assert drive.do(ResumeRequested()) == [OpenNextRound()]
    drive.join("ab")
    assert course(drive, 0.4) == [OpenNextRound()]  # the first value since the resume
    assert kinds(course(drive, 0.4)) == ["EndRun"]


def test_other_metrics_forget_what_the_old_ones_measured() -> None:
    drive = ready(best=ACCURACY, stop=STOP)
    course(drive, 0.9, 0.5)
    drive.do(StopRequested("enough"))
    rules = ready(best=WatchedMetric("loss", "server", "min"), stop=STOP).rules
    drive.do(ResumeRequested(rules=rules))
    assert drive.machine.ledger.best is None


def test_a_restart_computes_again_and_replays_to_the_same_decisions() -> None:
    drive = ready(best=ACCURACY, stop=STOP)
    course(drive, 0.5, 0.7)
    committed(drive)
    compute = drive.do(ModelEvaluated(Version(3), {"accuracy": (1.0, 2.0)}))
    other = RunMachine(drive.rules, decode_ledger(encode_ledger(drive.machine.ledger), where="here"))
    assert other.receive(CoordinatorStarted(drive.now), drive.now) == tuple(compute)
    for machine in (drive.machine, other):
        machine.receive(MetricsComputed(Version(3), "server", {"accuracy": 0.6}), drive.now)
    assert other.ledger.best == drive.machine.ledger.best == MeasuredVersion(Version(2), 0.7)
    assert other.ledger.progress == drive.machine.ledger.progress


def test_a_value_that_comes_after_the_end_still_names_the_best() -> None:
    drive = ready(best=ACCURACY)
    course(drive, 0.5)
    committed(drive)
    drive.do(ModelEvaluated(Version(2), {"accuracy": (1.0, 1.0)}))
    drive.do(StopRequested("enough"))
    assert drive.do(MetricsComputed(Version(2), "server", {"accuracy": 1.0})) == []
    assert drive.machine.ledger.best == MeasuredVersion(Version(2), 1.0)

"""`atoll.compare` beside `atoll compare`, and of runs of all kinds."""

import json

import pytest

import atoll
from tests.cli.invoking import invoke
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK

SETTINGS = {"round.cohort_size": 4, "simulation.engine": "sequential", "local.lr": 0.05, "train.batch_size": 8}


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "real_s"} for row in rows]


@pytest.mark.slow
def test_a_task_compared_is_what_the_command_prints(tmp_path, capfd):
    options = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    result = invoke("compare", TASK, "--rounds", 2, *options, "--target", 0.5, "--out", tmp_path / "command", "--json")
    expected = json.loads(result.stdout[result.stdout.index("{") :])
    capfd.readouterr()
    found = atoll.compare(line_task.task, rounds=2, set=SETTINGS, target=0.5, progress=False)
    assert capfd.readouterr() == ("", "")
    assert found.metric == expected["metric"] == "server/accuracy"
    assert without_time(found.document["rows"]) == without_time(expected["rows"])
    federated, centralized = found.runs
    there = atoll.SimulatedRun(tmp_path / "command" / "federated")
    assert (federated.state, federated.digest) == ("finished", there.digest)
    assert centralized.metrics == atoll.Training(tmp_path / "command" / "centralized").metrics
    assert found.rows.column("run") == ["federated", "federated, to 0.5", "centralized", "centralized, to 0.5"]
    assert found.points.column("run")[:2] == ["federated"] * 2
    assert next(iter(found.frame()["final"])) == federated.rounds.column("server.accuracy")[-1]
    [left, right] = found.plot().axes
    assert list(left.lines[0].get_ydata()) == list(right.lines[0].get_ydata())
    assert "<table>" in found._repr_html_()


@pytest.mark.slow
def test_runs_of_any_kind_stand_beside_each_other(tmp_path):
    kept = {**SETTINGS, "evaluation.clients_every": 1}
    del kept["train.batch_size"]
    slow = atoll.simulate(line_task.task, rounds=2, set=kept, progress=False)
    fast = atoll.simulate(line_task.task, rounds=3, set={**kept, "local.lr": 0.1}, out=tmp_path / "run", progress=False)
    training = atoll.train(line_task.task, epochs=1, out=tmp_path / "training", progress=False)
    found = atoll.compare(slow, fast, training)
    assert found.rows.column("run") == ["federated 1", "federated 2", "centralized"]
    assert found.rows.column("length")[:2] == ["2 rounds", "3 rounds"]
    assert found.rows.column("final")[1] == fast.rounds.column("server.accuracy")[-1]
    assert found.rows.column("final")[2] == training.metrics["test/accuracy"]
    assert found.rows.column("passes")[0] == 2 * line_task.task.local.epochs
    from_folder = atoll.compare(atoll.SimulatedRun(tmp_path / "run"), training, metric="loss", names=("a", "b"))
    assert from_folder.metric == "server/loss"
    assert from_folder.rows.column("run") == ["a", "b"]
    assert from_folder.rows.column("passes")[0] is None, "nothing tells the task"
    assert from_folder.plot().axes[1].lines
    by_name = atoll.compare(str(tmp_path / "run"), tmp_path / "training", metric="loss", names=("a", "b"))
    assert by_name.rows.column("final") == from_folder.rows.column("final")


def test_what_cannot_be_compared_is_said_before_anything_runs(tmp_path):
    task, run = line_task.task, atoll.SimulatedRun(tmp_path)
    for arguments, options, fault in [
        ((task,), {"set": {"train.epoch": 3}, "rounds": 1}, "train.epoch: unknown key"),
        ((task,), {"metric": "server/f1", "rounds": 1}, "--metric: got 'server/f1'; allowed: server/loss, server/acc"),
        ((task, run), {}, "got Task; allowed: .*, or one task alone"),
        ((run, task), {}, "got Task; allowed: simulated and deployed runs, trainings, folders of these"),
        ((tmp_path, "no-such-folder"), {}, "got no-such-folder; allowed: .* folders of these"),
        ((tmp_path,), {}, "got one run; allowed: two or more"),
        ((run,), {}, "got one run; allowed: two or more"),
        ((run, run), {"names": ["a"]}, "names: got 1; allowed: 2, one for each run"),
        ((run, run), {}, "has no rounds.jsonl"),
    ]:
        with pytest.raises(atoll.AtollError, match=fault):
            atoll.compare(*arguments, **options)

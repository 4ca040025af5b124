"""`atoll compare`: two real trainings of a small task."""

import json
from pathlib import Path

import pytest

from atoll.tensors import safetensors_file
from tests.cli.invoking import invoke, refused

TASK = "benchmarks.papers.digits:task"
SETTINGS = ["--clients", 4, "--set", "round.cohort_size=4", "--set", "round.over_selection=1.0"]
SMALL = [*SETTINGS, "--rounds", 3]
FAST = ["--set", "train.log_every=5", "--set", "simulation.engine=sequential", "--set", "local.lr=0.3"]


@pytest.mark.slow
def test_both_trainings_stand_beside_each_other_and_go_on_where_they_were(tmp_path: Path) -> None:
    out = tmp_path / "both"
    asked = ["compare", TASK, *SMALL, *FAST, "--out", out, "--target", 0.3]
    result = invoke(*asked, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{") :])
    federated, to_target, centralized, _ = found["rows"]
    assert federated["length"] == "3 rounds"
    # a client of 361 examples makes 5 x 16 / 361 passes in a round, three rounds make 0.66: at least one whole pass
    assert federated["passes"] == pytest.approx(3 * 5 * 16 * 4 / 1442, rel=0.01)
    assert centralized["passes"] == 1
    assert centralized["virtual_s"] is None
    assert to_target["length"] in (None, "1 round", "2 rounds", "3 rounds")
    assert federated["bytes"] == 2 * 3 * 4 * 2410 * 4  # down and up, rounds, clients, parameters, float32
    assert centralized["bytes"] == pytest.approx(1442 * (64 * 4 + 8), rel=0.01)
    assert (out / "compare.png").exists()
    assert (out / "centralized" / "model.safetensors").exists()
    again = invoke(*asked)
    assert again.exit_code == 0
    assert again.stdout.splitlines()[0] == "server/accuracy"
    assert [line.split("  ")[0] for line in again.stdout.splitlines()[2:]] == [
        "federated",
        "federated, to 0.3",
        "centralized",
        "centralized, to 0.3",
    ]


def test_a_mistake_on_either_side_is_refused_before_anything_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "train.epoch: unknown key" in refused("compare", TASK, "--out", out, *SMALL, "--set", "train.epoch=3")[0]
    assert "round.quorun: unknown key" in refused("compare", TASK, "--out", out, "--set", "round.quorun=3")[0]
    assert not out.exists()


def test_a_metric_that_is_not_measured_is_refused_before_anything_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["compare", TASK, *SMALL, *FAST, "--out", out]
    assert refused(*asked, "--metric", "server/f1") == [
        "--metric: got 'server/f1'; allowed: server/loss, server/accuracy"
    ]
    both = refused(*asked, "--set", "evaluation.clients_every=1", "--metric", "f1")
    assert both[0].endswith("allowed: server/loss, server/accuracy, clients/loss, clients/accuracy")
    (nothing,) = refused(*asked, "--set", "evaluation.server_every=0")
    assert nothing.startswith("no metric to compare by")
    assert not out.exists()


@pytest.mark.slow
def test_a_metric_that_turns_out_not_to_be_measured_is_named(tmp_path: Path) -> None:
    settings = ["--rounds", 1, "--set", "evaluation.clients_every=9"]
    result = invoke("compare", TASK, *SMALL, *FAST, *settings, "--out", tmp_path / "o", "--metric", "clients/loss")
    assert result.exit_code == 2
    said = result.stderr.splitlines()[-1]
    assert said.startswith("atoll: --metric: clients/loss was not measured in the federated and the ")


def test_both_trainings_start_from_the_same_file(tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    assert invoke("train", TASK, "--out", trained, "--device", "cpu", "--set", "train.steps=2").exit_code == 0
    start = trained / "model.safetensors"
    asked = ["compare", TASK, *SETTINGS, "--rounds", 1, *FAST, "--epochs", 1, "--no-plot"]
    asked += ["--set", "train.steps=1", "--set", "local.lr=0.000001"]
    out = tmp_path / "both"
    assert invoke(*asked, "--out", out, "--set", f"model.start={start}").exit_code == 0
    begun = safetensors_file.read(start)
    federated = out / "federated" / "models" / "versions" / "000001.safetensors"
    for model in (federated, out / "centralized" / "model.safetensors"):
        found = safetensors_file.read(model)
        assert all(abs(found[name] - begun[name]).max() < 1e-4 for name in begun), model
    missing = refused(*asked, "--out", tmp_path / "no", "--set", f"train.start={tmp_path / 'no.safetensors'}")
    assert missing == [f"train.start: there is no file {tmp_path / 'no.safetensors'}"]
    assert not (tmp_path / "no").exists()

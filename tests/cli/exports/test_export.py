"""`atoll export` of runs in folders and in a state directory, and `--export` of the commands that make runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.exports import deployed
from atoll.cli.exports.deployed import DeployedRun, is_settled
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.views.history import History
from tests.cli.invoking import invoke, refused, said, shown
from tests.exports.readers import expected, points
from tests.server.journal.test_codec import some_history
from tests.server.views.test_history import write_history
from tests.simulations.experiments.runs import line, write_run

NUM_ENTRIES = len(list(some_history()))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A run that was stopped in its fourth round, and no coordinator."""
    with StateDirectory.open(tmp_path / "state") as opened:
        write_history(opened, NUM_ENTRIES - 1)
    return tmp_path / "state"


def test_a_run_in_a_state_directory_has_its_rounds_and_measurements(state: Path, tmp_path: Path) -> None:
    (found,) = shown("export", "jsonl", "r", "--state", state, "--to", tmp_path / "to")
    assert (found["run"], found["state"]) == ("r", "stopped")
    numbers = points("jsonl", tmp_path / "to", "r")
    for row in shown("round", "list", "--run", "r", "--state", state):
        here = {name: numbers[f"round/{name}", row["round"]] for name in ("invited", "reported", "late", "round_s")}
        assert here == {
            "invited": [row["invited"]],
            "reported": [row["reported"]],
            "late": [row["carried_in"]],
            "round_s": [row["seconds"]],
        }
    measured = shown("run", "show", "r", "--state", state)["metrics"]
    assert measured
    for version, sources in measured.items():
        for source, values in sources.items():
            for metric, value in values.items():
                if isinstance(value, int | float):
                    assert numbers[f"{source}/{metric}", int(version)] == [value]
    again = said("export", "jsonl", "r", "--state", state, "--to", tmp_path / "to", "--follow")
    assert again == f"r (stopped): 0 rows written to {tmp_path}/to/r.jsonl\n"


def test_the_counts_of_a_round_agree_with_its_record(state: Path) -> None:
    records = {record.round_id: record for record in History(state).rounds("r")}
    rows = {row.step: row.values for row in DeployedRun("r", state).rows() if row.axis == "round"}
    assert rows.keys() == records.keys()
    for number, record in records.items():
        fates = [client.fate for client in record.clients.values()]
        assert rows[number]["round/stragglers"] == sum(fate in ("straggler", "late", "carried") for fate in fates)
        assert rows[number]["round/committed"] == (record.version is not None)
        used = sum(client.used_in == number for each in records.values() for client in each.clients.values())
        assert rows[number]["round/counted"] == used


ASYNC = {"mode": "fedbuff", "late": "discard", "max_staleness": 2}


@pytest.mark.parametrize(
    ("row", "run", "settled"),
    [
        ({}, {}, True),
        ({"ended_at": None}, {}, False),
        ({"phase": "collecting"}, {}, False),
        ({"base_version": 4}, {"late": "next_round"}, False),  # an update of the round may count in version 6
        ({"base_version": 3}, {"late": "next_round"}, True),
        ({"base_version": 3}, ASYNC, False),
        ({"base_version": 2}, ASYNC, True),
        ({"base_version": 2, "waiting": 1}, ASYNC, False),
        ({"base_version": 4, "waiting": 1}, ASYNC | {"state": "finished"}, True),
    ],
)
def test_a_round_is_exported_when_no_update_of_it_can_count_any_more(
    row: Mapping[str, Any], run: dict[str, Any], settled: bool
) -> None:
    rules = {"mode": "sync", "late": "discard", "max_staleness": 1} | run
    whole = {"state": rules.pop("state", "running"), "version": 5, "settings": {"round": rules}}
    ended = {"ended_at": 9.0, "phase": "committed", "waiting": 0, "base_version": 4, **row}
    assert is_settled(ended, whole) is settled


def test_sites_are_exported_by_version_and_left_out_when_they_are_many(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = {"north": {"loss": [(1, 0.5), (2, 0.25)], "auc": [(2, None)]}, "süd": {"loss": [(2, 1.0)]}}
    look = deployed.read_view

    def read_view(view: str, *place: Any, **options: Any) -> Any:
        sites = {"evaluation": {"curves": curves}, "training": {"curves": {}}}
        return sites if view == "sites" else look(view, *place, **options)

    monkeypatch.setattr(deployed, "read_view", read_view)
    rows = [row for row in DeployedRun("r", state).rows() if any(name.startswith("sites/") for name in row.values)]
    assert {(row.step, *row.values.items()) for row in rows} == {
        (1, ("sites/north/loss", 0.5)),
        (2, ("sites/north/loss", 0.25)),
        (2, ("sites/süd/loss", 1.0)),
    }
    monkeypatch.setattr(deployed, "SITES_MAX", 1)
    assert not [row for row in DeployedRun("r", state).rows() if "sites" in str(row.values)]
    assert "leaves out the values of 2 sites: --sites exports them" in capsys.readouterr().err
    assert len([row for row in DeployedRun("r", state, sites=True).rows() if "sites" in str(row.values)]) == 3


def test_a_folder_of_a_sweep_has_a_run_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for cell in ("a=1", "a=2"):
        write_run(tmp_path / "grid" / cell, [line(1), line(2)])
    said("export", "tensorboard", "grid")
    for cell in ("a-1", "a-2"):
        found = points("tensorboard", tmp_path / "grid" / "tensorboard", cell)
        assert found.keys() == expected(tmp_path / "grid" / cell.replace("-", "=")).keys()
    (fault,) = refused("export", "tensorboard", "grid", "--follow")
    assert fault.startswith("--follow: grid has 2 runs; allowed: the folder of one run; or leave --follow out")


def test_an_unfinished_run_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, lines = write_run(tmp_path / "run", [line(1)], state="interrupted"), [line(1)]

    def goes_on(_seconds: float) -> None:
        lines.append(line(len(lines) + 1))
        write_run(run, lines, state="finished" if len(lines) == 4 else None)

    monkeypatch.setattr("atoll.cli.exports.export.time.sleep", goes_on)
    result = invoke("export", "jsonl", run, "--follow")
    assert result.stderr == f"{run}: no process runs this simulation: start it, and the export continues\n"
    assert result.stdout == f"run (finished): 4 rows written to {run}/jsonl/run.jsonl\n"
    assert points("jsonl", run / "jsonl", "run") == expected(run)


def test_what_is_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_IDENTITY", str(tmp_path / "none"))
    assert refused("export", "jsonl", "x")[0].startswith("x: there is no such folder, and no state directory atoll-st")
    assert refused("export", "jsonl", "x", "--state", state) == ["there is no run 'x' (known: r)"]
    assert refused("export", "jsonl", ".")[0].startswith(".: has no rounds.jsonl and no log.jsonl")
    (tmp_path / "file").touch()
    assert refused("export", "wndb", "x", "--to", "file")[1] == "--to: got 'file', which is a file; allowed: a folder"
    assert refused("export", "wndb", "x")[0].startswith("TOOL: got 'wndb': did you mean wandb?")
    assert refused("export", "otpl", "x")[0].startswith("TOOL: got 'otpl': did you mean otlp?")


@pytest.mark.real
def test_a_tracking_server_that_does_not_answer_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = invoke("export", "mlflow", write_run(tmp_path / "run", [line(1)]), "--to", "http://u:secret@127.0.0.1:9")
    assert result.exit_code == 75
    assert result.stderr.startswith("atoll: http://u@127.0.0.1:9: ")
    assert result.stderr.endswith("; the same command resumes it\n")
    assert "secret" not in result.stderr


@pytest.mark.real
def test_a_simulation_and_a_training_are_exported_as_they_go_on(tmp_path: Path) -> None:
    task = "tests.odd_tasks.tasks.base:plain"
    options = ("--rounds", 2, "--engine", "sequential", "--set", "round.cohort_size=2")
    said(
        "simulate",
        task,
        *options,
        "--out",
        tmp_path / "sim",
        "--export",
        "jsonl",
        "--export",
        f"tensorboard:{tmp_path}",
    )
    assert points("jsonl", tmp_path / "sim" / "jsonl", "sim") == expected(tmp_path / "sim")
    assert points("tensorboard", tmp_path, "sim").keys() == expected(tmp_path / "sim").keys()
    last = json.loads((tmp_path / "sim" / "jsonl" / "sim.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["state"], last["version"]) == ("state", "finished", 2)
    said("train", task, "--steps", 3, "--out", tmp_path / "train", "--export", "jsonl")
    log = [json.loads(text) for text in (tmp_path / "train" / "log.jsonl").read_text().splitlines()]
    losses = {("loss", event["step"]): [event["loss"]] for event in log if event["event"] == "step"}
    found = points("jsonl", tmp_path / "train" / "jsonl", "train")
    assert losses
    assert {key: values for key, values in found.items() if key[0] == "loss"} == losses
    assert said("export", "jsonl", tmp_path / "train").startswith("train (finished): 0 rows written to ")


@pytest.mark.parametrize("command", ["simulate", "train"])
def test_an_export_that_cannot_be_is_refused_before_anything_runs(command: str, tmp_path: Path) -> None:
    task = "tests.odd_tasks.tasks.base:plain"
    (fault,) = refused(command, task, "--out", tmp_path / "out", "--export", "tensorbord")
    assert fault.startswith("--export: got 'tensorbord': did you mean tensorboard?")
    assert not (tmp_path / "out").exists()

"""The main() of a Flower app that is simulated: its folder, and its end after the last round, by each command."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

import atoll
from tests.federation.processes import ATOLL

APP = str(Path(__file__).parents[2] / "flower" / "apps" / "every_strategy")
GIVEN = ("--set", "program.native=true", "--set", "rounds=2", "--set", 'task.out="final.npz"')

pytestmark = pytest.mark.real


def run(*command, folder):
    return subprocess.run([ATOLL, *command], capture_output=True, text=True, cwd=folder)


def test_every_command_lets_main_go_on_in_the_folder_of_the_run(tmp_path):
    one = run("simulate", APP, "--clients", "7", "--out", "one", *GIVEN, folder=tmp_path)
    two = run("flower", "run", APP, "--simulate", "--nodes", "7", "--out", "two", *GIVEN, folder=tmp_path)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    of_python = atoll.simulate(
        APP,
        rounds=2,
        clients=7,
        out=tmp_path / "three",
        set={"task.out": "final.npz", "program.native": True},
        progress=False,
    )
    assert of_python.state == "finished"
    written = [(tmp_path / name / "app" / "final.npz").read_bytes() for name in ("one", "two", "three")]
    assert written[0] == written[1] == written[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three", "two"], "nothing in the current folder"
    with np.load(tmp_path / "one" / "app" / "final.npz") as result:
        model = of_python.model()
        assert sorted(result) == sorted(model)
        assert all(np.array_equal(result[name], model[name]) for name in model)


def test_clients_with_a_state_train_in_other_processes_too(tmp_path):
    """With several threads a process gets the task pickled, without the main() that waits here."""
    given = ("--clients", "7", *GIVEN, "--set", "simulation.workers=2")
    for name, engine in (("one", ()), ("two", ("engine=processes",)), ("three", ("engine=processes", "threads=2"))):
        settings = [part for each in engine for part in ("--set", f"simulation.{each}")]
        done = run("simulate", APP, "--out", name, *given, *settings, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    written = [(tmp_path / name / "app" / "final.npz").read_bytes() for name in ("one", "two", "three")]
    assert written[0] == written[1] == written[2]


def test_main_goes_on_once_for_each_result_and_again_after_it_failed(tmp_path):
    given = ("--clients", "7", "--out", "run", "--set", "program.native=true", "--set", 'task.out="made/final.npz"')
    failed = run("simulate", APP, "--rounds", "1", *given, folder=tmp_path)
    assert failed.returncode != 0
    assert "No such file or directory: 'made/final.npz'" in " ".join(failed.stderr.split())
    made = tmp_path / "run" / "app" / "made"
    made.mkdir()
    for rounds, is_written in (("1", True), ("1", False), ("2", True)):
        done = run("simulate", APP, "--rounds", rounds, *given, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (made / "final.npz").exists() == is_written, rounds
        (made / "final.npz").unlink(missing_ok=True)

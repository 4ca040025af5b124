"""`atoll.simulate` beside `atoll simulate`, from a script, from a running loop and from a cell."""

import asyncio
import json
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import atoll
from atoll.interface.overrides import overrides_of
from tests.federation.processes import ATOLL
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "round.cohort_size": 3,
    "simulation.engine": "sequential",
    "evaluation.clients_every": 1,
    "schedule.local.lr": {"kind": "cosine", "end": 0.01},
    "model.best": "accuracy",
    "model.keep_versions": 2,
}


def simulated(task=line_task.task, **others):
    return atoll.simulate(task, rounds=4, set={**SETTINGS, **others.pop("set", {})}, progress=False, **others)


@pytest.mark.slow
def test_the_same_settings_end_at_the_commands_digest(tmp_path):
    options = [part for each in overrides_of(SETTINGS) for part in ("--set", each)]
    command = [ATOLL, "simulate", TASK, "--rounds", "4", "--out", tmp_path / "command", "--json", *options]
    expected = json.loads(subprocess.check_output(command, text=True))
    for task in (line_task.task, TASK):
        run = simulated(task)
        assert (run.state, run.digest) == ("finished", expected["model_digest"])
    assert atoll.SimulatedRun(tmp_path / "command").rounds.column("server.accuracy") == run.rounds.column(
        "server.accuracy"
    )


def test_the_run_has_its_rounds_its_model_and_its_plot(tmp_path, capfd):
    run = simulated(out=tmp_path / "run")
    assert capfd.readouterr() == ("", "")
    assert run.rounds.column("round") == [1, 2, 3, 4]
    frame = run.rounds.frame()
    assert list(frame["server.accuracy"]) == run.rounds.column("server.accuracy")
    assert list(run.sites.frame().groupby("site")["version"].max()) == [4, 4, 4, 4]
    best = run.result["best"]["version"]
    assert max(run.rounds.column("server.accuracy")) == run.rounds.column("server.accuracy")[best - 1]
    assert not all(np.array_equal(run.model(best)[name], array) for name, array in run.model(0).items())
    assert all(np.array_equal(run.model("best")[name], array) for name, array in run.model(best).items())
    [axes] = run.plot("accuracy").axes
    assert list(axes.lines[0].get_ydata()) == run.rounds.column("server.accuracy")
    assert "<table>" in run._repr_html_()


def test_what_is_not_there_is_said_with_what_is():
    run = simulated()
    with pytest.raises(atoll.AtollError, match=r"version 99 was not made: the run is finished at version 4"):
        run.model(99)
    with pytest.raises(atoll.AtollError, match="got 'auc'; allowed: server/accuracy"):
        run.plot("auc")
    with pytest.raises(KeyError, match="columns: round"):
        run.rounds.column("rond")


def test_mistakes_are_raised_all_at_once_before_anything_runs(tmp_path):
    with pytest.raises(atoll.AtollError) as refused:
        simulated(out=tmp_path / "run", set={"round.cohort_sise": 3, "seed": -1})
    assert len(refused.value.faults) == 2
    assert not (tmp_path / "run").exists()
    with pytest.raises(atoll.AtollError, match=r"set: seed: got <object object"):
        simulated(set={"seed": object()})
    with pytest.raises(atoll.AtollError, match="task: got int; allowed: a Task"):
        atoll.simulate(7)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_in_its_folder(tmp_path):
    whole = simulated()
    fixed = {"schedule.local.lr": {"kind": "cosine", "end": 0.01, "rounds": 4}}
    part = atoll.simulate(line_task.task, rounds=2, set={**SETTINGS, **fixed}, out=tmp_path / "run", progress=False)
    assert len(part.rounds) == 2
    again = atoll.simulate(line_task.task, rounds=4, set={**SETTINGS, **fixed}, out=tmp_path / "run", progress=False)
    assert again.digest == whole.digest


def test_it_runs_inside_of_a_loop_and_leaves_the_handlers_of_signals_alone():
    async def cell():
        return simulated()

    import signal

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert asyncio.run(cell()).state == "finished"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


CELL = """
import atoll
from tests.simulations.federation import line_task
task = atoll.Task(model=line_task.model, data=line_task.data, loss=lambda o, t: line_task.task.loss(o, t),
                  sites=line_task.SITES, test_data=line_task.task.test_data)
run = atoll.simulate(task, rounds=2, set={"round.cohort_size": 4}, progress=False)
print(run.state, run.result["engine"])
try:
    atoll.simulate(task, rounds=2, set={"simulation.engine": "processes"}, progress=False)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_task_of_a_cell_trains_in_this_process_and_says_so_elsewhere():
    command = [sys.executable, "-c", CELL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S)
    first, second = done.stdout.splitlines()
    assert first.startswith("finished")
    assert "process" not in first
    assert "other processes cannot import a task of a cell or of standard input: put it into a file" in second
    assert done.stderr == ""


@pytest.mark.real
def test_a_script_on_standard_input_runs_and_its_task_is_in_no_file():
    """As by a heredoc, `ssh host python -` or `docker exec -i`; a task of an importable file is found there."""
    imported = "import atoll; from tests.simulations.federation.line_task import task\n" + (
        "print(atoll.simulate(task, rounds=1, set={'round.cohort_size': 4, 'simulation.engine': 'processes', "
        "'simulation.workers': 2}, progress=False).state)"
    )
    for script, told in ((CELL, "or of standard input: put it into a file"), (imported, "finished")):
        done = subprocess.run(
            [sys.executable, "-"], input=script, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("finished")
        assert told in done.stdout


class Broken(RuntimeError):
    """The user's own error."""


def broken(outputs, targets):
    raise Broken("as it is")


def test_an_error_has_the_user_s_frames_above_it_and_none_of_ours():
    with pytest.raises(atoll.AtollError) as refused:
        simulated(**{"set": {"round.quorum": 7}})
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__
    task = replace(line_task.task, loss=broken)
    with pytest.raises(atoll.AtollError, match="Broken: as it is") as failed:
        atoll.simulate(task, rounds=1, set={"simulation.engine": "sequential"}, progress=False)
    shown = traceback.format_exception(failed.value.__cause__)
    assert isinstance(failed.value.__cause__, Broken)
    assert [line for line in shown if "simulations" in line and "line_task" not in line] == []


def test_a_version_that_a_failed_run_has_not_made_is_told_with_the_cause():
    many = replace(line_task.task, units=lambda targets: len(targets) * 1e9)
    run = atoll.simulate(many, rounds=2, set={**SETTINGS, "round.retry": 0}, progress=False)
    assert run.state == "failed"
    assert "1 refused (too_many_examples)" in run.result["cause"]
    [(reason, found)] = run.result["refusals"].items()
    assert (reason, found["count"]) == ("too_many_examples", 1)
    assert "too_many_examples: num_examples" in found["first"]
    assert all("too_many_examples: num_examples" in text for text in run.report.rounds[0]["refusals"].values())
    with pytest.raises(atoll.AtollError, match="version 1 was not made: the run is failed at version 0: 1 round was"):
        run.model(1)


@pytest.mark.real
def test_the_import_is_without_torch_grpc_and_pandas():
    code = "import sys, atoll; print(sorted({'torch', 'grpc', 'pandas', 'pydantic'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"
    with pytest.raises(AttributeError, match="module 'atoll' has no attribute 'simulat'"):
        _ = atoll.simulat

"""`atoll.sweep` beside `atoll sweep`: the same cells, digests and table, in processes and in this one."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import atoll
from atoll.simulations.experiments.plots import metric_per_epsilon
from tests.cli.invoking import invoke
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[2]
BASE = {"rounds": 2, "round.cohort_size": 4, "simulation.engine": "sequential"}
GRID = {"local.lr": [0.05, 0.1], "seed": [1, 2]}
TOML = f"""
task = "{TASK}"
rounds = 2
round.cohort_size = 4
simulation.engine = "sequential"
[grid]
"local.lr" = [0.05, 0.1]
seed = [1, 2]
"""


@pytest.mark.real
def test_the_table_and_the_digests_are_the_commands(tmp_path, capfd):
    path = tmp_path / "grid.toml"
    path.write_text(TOML)
    result = invoke("sweep", path, "--out", tmp_path / "command", "--jobs", 2, "--json", "--target", 0.2)
    expected = json.loads(result.stdout[result.stdout.index("{") :])
    capfd.readouterr()
    here = atoll.sweep(GRID, line_task.task, set=BASE, target=0.2, progress=False)
    there = atoll.sweep(path, out=tmp_path / "command", target=0.2, progress=False)  # all cells are finished there
    assert capfd.readouterr() == ("", "")
    assert there.document == expected, "what a second call reads of the same folders"
    assert here.document == expected
    digests = [each.digest for each in here]
    assert len(set(digests)) == 4
    assert here.cells.column("digest") == there.cells.column("digest") == digests
    assert [each.digest for each in there] == digests


@pytest.mark.slow
def test_the_table_has_values_and_means_over_the_seeds(tmp_path):
    found = atoll.sweep({"grid": {"local.lr": np.array([0.05, 0.1]), "seed": (1, 2)}, "task": line_task.task, **BASE})
    assert found.metric == "server/accuracy"
    assert found.rows.column("local.lr") == [0.05, 0.1]
    finals = [run.rounds.column("server.accuracy")[-1] for run in found]
    assert found.rows.column("final") == pytest.approx([np.mean(finals[:2]), np.mean(finals[2:])])
    assert found.rows.column("final.std")[0] == pytest.approx(np.std(finals[:2], ddof=1))
    assert list(found.frame()["final.n"]) == [2, 2]
    assert found.cells.column("seed") == [1, 2, 1, 2]
    assert [run.result["seed"] for run in found[1:3]] == [2, 1]
    assert found.table("rounds_to_target", target=0.01).column("rounds_to_target") == [1, 1]
    with pytest.raises(atoll.AtollError, match="column speed: unknown"):
        found.table("speed")
    assert len(found.plot("loss").axes[0].lines) == 2
    assert "<table>" in found._repr_html_()
    folder = found.folder
    last = found[-1]
    del found
    assert last.state == "finished", "a run keeps the folder of its sweep"
    del last
    assert not folder.exists()


def test_a_cell_that_fails_stops_no_other_and_says_why():
    found = atoll.sweep({"local.lr": [1e30, 0.1]}, line_task.task, set=BASE, progress=False)
    assert found.rows.column("state") == ["failed", "finished"]
    [(name, reason)] = found.failures.items()
    assert name == "lr 1e+30"
    assert reason


def test_mistakes_are_said_before_anything_runs(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(TOML)
    task = line_task.task
    for arguments, options, faults in [
        (({"round.retri": [1], "round.cohort_sise": [3]}, task), {}, 2),
        (({"seed": [1]},), {}, "task: missing"),
        ((path, task), {}, "names the task: leave it out"),
        (({"seed": [object()]}, task), {}, "grid: seed: got .*; allowed: numbers, strings"),
        (({"seed": 1}, task), {}, "grid.seed: got 1; allowed: a list of values"),
        (({"seed": [1]}, task), {"jobs": 0}, "jobs: got 0; allowed: a whole number, at least 1, at most"),
        (({"seed": [1]}, task), {"metric": "server/f1"}, "server/f1"),
        (({"seed": [1]}, task), {"set": {"seed": 3}}, "seed is varied by the grid"),
        ((tmp_path / "none.toml",), {}, "there is no "),
    ]:
        out = tmp_path / "out"
        with pytest.raises(atoll.AtollError, match=faults if isinstance(faults, str) else None) as refused:
            atoll.sweep(*arguments, set=options.pop("set", BASE), out=out, progress=False, **options)
        assert isinstance(faults, str) or len(refused.value.faults) == faults
        assert not out.exists()


CELL = """
import atoll
from tests.simulations.federation import line_task
task = atoll.Task(model=line_task.model, data=line_task.data, loss=lambda o, t: line_task.task.loss(o, t),
                  sites=line_task.SITES, test_data=line_task.task.test_data)
base = {"rounds": 1, "round.cohort_size": 4}
print([run.state for run in atoll.sweep({"seed": [1, 2]}, task, set=base, progress=False)])
print(atoll.compare(task, rounds=1, set={"round.cohort_size": 4}, progress=False, metric="server/loss").metric)
for call in (
    lambda: atoll.sweep({"seed": [1, 2]}, task, set=base, jobs=2, progress=False),
    lambda: atoll.sweep({"simulation.engine": ["processes"]}, task, set=base, progress=False),
    lambda: atoll.compare(task, rounds=1, set={"simulation.workers": 2}, progress=False),
    lambda: atoll.train(task, mesh="dp=2", progress=False),
    lambda: atoll.connect("state").start(task),
):
    try:
        print(call())
    except atoll.AtollError as error:
        print("refused:", error)
"""


@pytest.mark.slow
@pytest.mark.real
def test_a_task_of_a_cell_is_swept_and_compared_in_this_process(tmp_path):
    (tmp_path / "state").mkdir()
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CELL], cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_S, env=environment
    )
    states, metric, *refused = done.stdout.splitlines()
    assert (states, metric) == ("['finished', 'finished']", "server/loss"), done.stderr
    assert len(refused) == 5
    assert all(
        "other processes cannot import a task of a cell or of standard input: put it into a file" in line
        for line in refused
    )
    assert done.stderr == ""


BUDGETS = {
    "budget": [
        {"name": "none"},
        *({"name": f"epsilon {e}", "privacy": {"epsilon": e, "delta": 1e-6, "clip_norm": 1.0}} for e in (8.0, 80.0)),
    ]
}


@pytest.mark.slow
def test_a_sweep_over_budgets_has_what_each_spent_and_its_plot(tmp_path):
    given = {**BASE, "aggregation.weighting": "uniform"}
    found = atoll.sweep(BUDGETS, line_task.task, set=given, out=tmp_path / "all", progress=False)
    assert found.table("final", "epsilon").column("epsilon") == [None, pytest.approx(8.0), pytest.approx(80.0)]
    assert all(run.privacy is None or run.privacy["sentence"].startswith("no guarantee") for run in found)
    (axes,) = figure_of(found)
    assert axes.lines[0].get_xdata().tolist() == [pytest.approx(8.0), pytest.approx(80.0)]


def figure_of(found):
    """Return the axes of the plot over epsilon of a sweep's runs."""
    from matplotlib.figure import Figure

    figure = Figure()
    metric_per_epsilon(figure.subplots(), [run.report for run in found], found.metric)
    return figure.axes

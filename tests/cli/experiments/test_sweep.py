import csv
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.cli.experiments.sweep_progress import SweepProgress
from atoll.simulations.experiments import sweep
from atoll.simulations.experiments.grid import Cell, Grid, SweepConfig
from tests.cli.invoking import invoke, refused, said, shown
from tests.process_table import descendants, is_running
from tests.simulations.experiments import fake_simulate
from tests.waiting import BOUND_S

GRID = 'task = "digits.py:task"\n[grid]\nspeed = [0.25, 0.5]\nseed = [1, 2]\n[sweep]\ntarget = 0.75\n'


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep whose cells are run by a script of four rounds."""

    def command(cell: Cell, folder: Path) -> list[str]:
        values = (folder, 4, cell.settings["speed"], cell.settings.get("fails", False), 0.0)
        return [sys.executable, "-m", fake_simulate.__name__, *map(str, values)]

    monkeypatch.setattr(sweep, "simulate", command)
    monkeypatch.setattr(
        "atoll.operations.sweep.check_cells", lambda *_: None
    )  # the script has settings of its own, and no task
    monkeypatch.setattr("atoll.operations.sweep._task_of", lambda _: object())
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "policies.toml"
    path.write_text(GRID)
    return path


@pytest.mark.real
def test_a_sweep_ends_with_a_table_and_plots(grid: Path) -> None:
    result = invoke("sweep", grid, "--jobs", 2)
    assert result.exit_code == 0
    header, slow, fast = result.stdout.splitlines()
    assert header.split()[:3] == ["speed", "final", "server/accuracy"]
    assert slow.split()[:4] == ["0.25", "1", "±", "0"]
    assert "3 ± 0" in slow  # rounds to 0.75 at 0.25 a round
    assert "2 ± 0" in fast
    plots = grid.parent / "atoll-sweep-policies" / "plots"
    assert (plots / "overview.png").exists()
    assert "speed 0.5, seed 2: finished" in result.stderr


@pytest.mark.real
def test_a_script_gets_the_same_as_json_and_a_page_as_markdown(grid: Path) -> None:
    invoke("sweep", grid, "--no-plot")
    found = shown("sweep", grid, "--show", "--no-plot", "--columns", "rounds_to_target")
    assert (found["metric"], found["target"]) == ("server/accuracy", 0.75)
    assert [row["values"]["rounds_to_target"]["mean"] for row in found["rows"]] == [3, 2]
    page = said("sweep", grid, "--show", "--no-plot", "--markdown", "--columns", "best")
    assert page.splitlines()[::2] == ["| speed | best server/accuracy | seed |", "| 0.25 | 1 ± 0 | 1, 2 |"]
    table = list(csv.DictReader(io.StringIO(said("sweep", grid, "--show", "--no-plot", "--csv"))))
    assert [(row["seed"], row["rounds_to_target"], row["rounds_to_target_n"]) for row in table] == [
        ("1 2", "3.0", "2"),
        ("1 2", "2.0", "2"),
    ]
    by = shown("sweep", grid, "--show", "--no-plot", "--by", "updates")
    assert (by["by"], by["common"], list(by["rows"][0]["values"])[:2]) == (
        "updates",
        44,
        ["at_common", "updates_to_target"],
    )


@pytest.mark.real
def test_a_failed_cell_is_reported_and_the_exit_code_is_1(grid: Path) -> None:
    result = invoke("sweep", grid, "--no-plot", "--set", "fails=true")
    assert result.exit_code == 1
    assert "speed 0.25, seed 1: failed: it broke" in result.stderr
    assert result.stdout.splitlines()[1].endswith("failed")


def test_cells_can_be_looked_at_before_they_are_run(grid: Path) -> None:
    assert len(shown("sweep", grid, "--check")) == 4
    assert not (grid.parent / "atoll-sweep-policies").exists()
    assert "speed=0.5_seed=2-" in said("sweep", grid, "--check")


def test_mistakes_are_refused_before_anything_runs(grid: Path) -> None:
    assert "unknown (known:" in refused("sweep", grid, "--columns", "speed")[0]
    assert refused("sweep", grid.parent / "none.toml")[0] == f"there is no {grid.parent / 'none.toml'}"
    assert "no cell has a report yet" in refused("sweep", grid, "--show")[0]


def test_an_unknown_setting_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text('task = "a:b"\n[grid]\n"round.dedline" = [1, 2]\n"round.quorum" = [0, 1]\n')
    deadline, quorum = sorted(refused("sweep", path, "--out", tmp_path / "out"), reverse=True)
    assert deadline.startswith("dedline 1, quorum 0 and 3 more cells: round.dedline: unknown key (did you mean dead")
    assert quorum.startswith("dedline 1, quorum 0 and 1 more cell: round.quorum: got 0")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", ["--check", "--jobs=1"])
def test_each_cell_is_tried_with_its_task_before_the_first_one_runs(tmp_path: Path, word: str) -> None:
    path, out = tmp_path / "grid.toml", tmp_path / "out"
    task = "tests.simulations.federation.line_task:task"
    path.write_text(f'task = "{task}"\n[grid]\n"local.lr" = [0.1, -1]\n"round.cohort_size" = [3, 77]\n')
    assert refused("sweep", path, word, "--out", out) == [
        "lr 0.1, cohort_size 77 and 1 more cell: round.cohort_size: got 77; allowed: at most 4, the number of clients",
        "lr -1, cohort_size 3 and 1 more cell: local.lr: must be positive and finite, got -1",
    ]
    path.write_text(f'task = "{task[:-4]}tusk"\n[grid]\nseed = [1, 2]\n')
    (fault,) = refused("sweep", path, word, "--out", out)
    assert fault.endswith("(tasks there: task, no_test_data, awaits_test_data, undefined)")
    assert not out.exists()


@pytest.mark.real
def test_cells_that_are_finished_are_not_tried_again(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their task may be another one by now, or gone."""
    tried = list[str]()
    monkeypatch.setattr(
        "atoll.operations.sweep._try_cells", lambda grid, cells, task: tried.extend(cell.name for cell in cells)
    )
    invoke("sweep", grid, "--no-plot")
    assert len(tried) == 4
    invoke("sweep", grid, "--no-plot")
    assert len(tried) == 4


TASK = "tests.simulations.federation.line_task:task"


@pytest.mark.parametrize(
    ("metric", "fault"),
    [
        (
            "nope",
            "allowed: GROUP/NAME, where GROUP is one of server, clients, train, honest_clients, honest_train, such as "
            "server/loss",
        ),
        ("server/nope", "allowed: server/accuracy, server/loss"),
        ("clients/loss", "it will not be measured, because evaluation.clients_every is 0"),
    ],
)
@pytest.mark.parametrize("with_check", [False, True])
def test_a_metric_that_no_cell_measures_is_refused_at_the_start(
    tmp_path: Path, metric: str, fault: str, with_check: bool
) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(f'task = "{TASK}"\n[grid]\nseed = [1, 2]\n[sweep]\nmetric = "{metric}"\n')
    asked = [path, "--out", tmp_path / "out", *(["--check"] if with_check else [])]
    assert refused("sweep", *asked) == [f"sweep.metric: got {metric!r}; {fault}"]
    assert refused("sweep", *asked, "--metric", "client/loss")[0].startswith(
        "--metric: got 'client/loss'; allowed: GROUP"
    )
    assert not (tmp_path / "out").exists()


def test_faults_of_the_metric_and_of_the_cells_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(f'task = "{TASK}"\n[grid]\n"local.lr" = [-1]\n[sweep]\nmetric = "server/nope"\n')
    assert [fault.split(": got")[0] for fault in refused("sweep", path, "--check")] == [
        "lr -1: local.lr: must be positive and finite, got -1",
        "sweep.metric",
    ]


@pytest.mark.real
def test_what_only_a_round_can_tell_is_refused_when_the_first_has_ended(grid: Path) -> None:
    (fault,) = refused_late("sweep", grid, "--metric", "server/nope")
    assert fault == "--metric: got 'server/nope'; the runs measure server/accuracy, train/loss"
    logs = [*grid.parent.glob("atoll-sweep-policies/*/rounds.jsonl")]
    assert len(logs) < 4  # the other cells were not run
    assert invoke("sweep", grid, "--no-plot", "--metric", "server/accuracy").exit_code == 0
    assert refused("sweep", grid, "--show", "--metric", "clients/loss")[0].startswith(
        "--metric: got 'clients/loss'; the runs measure"
    )


def refused_late(*arguments: object) -> list[str]:
    """Return the faults of a command that has run some cells before it is refused."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    return [line.removeprefix("atoll: ") for line in result.stderr.splitlines() if line.startswith("atoll: ")]


def test_the_sweep_of_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "experiments.md").read_text("utf-8")
    text = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert text is not None
    (tmp_path / "digits.py").write_text("from benchmarks.papers.digits import task\n")
    (tmp_path / "policies.toml").write_text(text[1])
    assert len(shown("sweep", tmp_path / "policies.toml", "--check")) == 12


@pytest.mark.real
def test_the_cells_of_a_killed_sweep_end_with_it(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(
        'task = "tests.simulations.federation.line_task:task"\nrounds = 1_000_000\n[round]\ncohort_size = 4\n'
        '[simulation]\nengine = "sequential"\n[grid]\nseed = [1]\n'
    )
    command = [sys.executable, "-m", "atoll", "sweep", str(path), "--out", str(tmp_path / "out")]
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": root}) as process:
        try:
            wait_for(lambda: list(tmp_path.glob("out/*/rounds.jsonl")))
            (cell,) = descendants(process.pid)
        finally:
            process.kill()
    wait_for(lambda: not is_running(cell))


def wait_for(is_so: Callable[[], object], seconds: float = BOUND_S) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.real
def test_a_sweep_of_real_simulations(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(
        'task = "benchmarks.papers.digits:task"\nrounds = 2\n'
        '[population]\nkind = "iid"\nclients = 4\n'
        '[round]\ncohort_size = 4\n[simulation]\nengine = "sequential"\n[grid]\n"local.lr" = [0.1]\n'
    )
    found = shown("sweep", path, "--out", tmp_path / "out", "--columns", "rounds,bytes_up")
    (row,) = found["rows"]
    assert (row["state"], row["values"]["rounds"]["mean"]) == ("finished", 2)
    assert row["values"]["bytes_up"]["mean"] == 2 * 4 * 2410 * 4  # rounds, clients, parameters, float32


def test_time_left_is_of_the_cells_that_ended_here() -> None:
    cells = tuple(Cell({"k": str(k)}, {"k": k}, "t:t") for k in range(5))
    now = [100.0]
    said: list[str] = []
    watching = SweepProgress(
        io.StringIO(), said.append, Grid(cells, SweepConfig(), Path()), lambda _: "", clock=lambda: now[0]
    )
    states = {cell.folder: "waiting" for cell in cells} | {cells[0].folder: "finished"}
    watching.see(sweep.Progress(states))  # type: ignore[arg-type]
    assert watching.seconds_left(1) is None
    now[0] = 110.0
    watching.see(sweep.Progress(states | {cells[1].folder: "finished"}))  # type: ignore[arg-type]
    assert watching.seconds_left(2) == 30.0
    assert said == ["finished already: 1 of 5 cells", "k 1: finished"]

import json
import os
import sys
import time
from pathlib import Path

import pytest

from atoll.simulations.experiments.grid import Cell, Grid, SweepConfig
from atoll.simulations.experiments.sweep import Progress, last_words, run_cells, simulate
from tests.simulations.experiments import fake_simulate
from tests.simulations.experiments.runs import line
from tests.waiting import BOUND_S


def fake(rounds: int = 3, *, sleep_s: float = 0.0) -> "object":
    def command(cell: Cell, folder: Path) -> list[str]:
        values = (folder, rounds, cell.settings["speed"], cell.settings.get("fails", False), sleep_s)
        return [sys.executable, "-m", fake_simulate.__name__, *map(str, values)]

    return command


MEET = """
import sys, time
from pathlib import Path
from tests.simulations.experiments.fake_simulate import main
(out, speed, fails), until = sys.argv[1:], time.monotonic() + {bound_s}
(Path(out) / "is_here").touch()
while len(list(Path(out).parent.glob("*/is_here"))) < 2:
    time.sleep(0.01)
    assert time.monotonic() < until
sys.exit(main(Path(out), 3, float(speed), fails == "True", 0.0))
"""


def meeting(cell: Cell, folder: Path) -> list[str]:
    """Return the command of a cell that begins when two have started."""
    values = (folder, cell.settings["speed"], cell.settings.get("fails", False))
    return [sys.executable, "-c", MEET.format(bound_s=BOUND_S), *map(str, values)]


def grid_of(folder: Path, *cells: dict[str, object]) -> Grid:
    return Grid(
        tuple(Cell({"cell": str(k)}, {"speed": 0.25, **settings}, "t:t") for k, settings in enumerate(cells)),
        SweepConfig(),
        Path(__file__).parents[3],
    )


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


def test_every_cell_is_run_in_a_folder_of_its_own_and_a_failure_stops_no_other(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, {}, {"fails": True}, {"speed": 0.5})
    seen: list[int] = []
    done = run_cells(grid, tmp_path, jobs=2, command=meeting, watch=lambda p: seen.append(p.count("running")))
    assert list(done.states.values()) == ["finished", "failed", "finished"], "two have run at once"
    assert max(seen) <= 2
    assert last_words(tmp_path / grid.cells[1].folder) == "it broke"
    assert len((tmp_path / grid.cells[2].folder / "rounds.jsonl").read_text().splitlines()) == 3


def test_what_is_finished_is_not_run_again_and_what_failed_is(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, {}, {"fails": True})
    for _ in range(2):
        run_cells(grid, tmp_path, command=fake(1))  # type: ignore[arg-type]
    assert [starts(tmp_path / cell.folder) for cell in grid.cells] == [1, 2]


def test_an_interrupted_sweep_ends_its_runs_and_goes_on_later(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, {}, {})
    folder = tmp_path / grid.cells[0].folder

    def interrupt(progress: Progress) -> None:
        if progress.rounds.get(grid.cells[0].folder, 0) >= 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells(grid, tmp_path, command=fake(40, sleep_s=0.05), watch=interrupt)  # type: ignore[arg-type]
    before = (folder / "rounds.jsonl").read_text()
    assert 1 <= len(before.splitlines()) < 40
    assert not (tmp_path / grid.cells[1].folder).exists()
    time.sleep(0.15)
    assert (folder / "rounds.jsonl").read_text() == before  # its process is gone
    run_cells(grid, tmp_path, command=fake(40))  # type: ignore[arg-type]
    lines = [json.loads(text)["round"] for text in (folder / "rounds.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 41))


def test_runs_at_once_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    grid = grid_of(tmp_path, {})
    show = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    run_cells(grid, tmp_path, jobs=1000, command=lambda *_: show)
    assert last_words(tmp_path / grid.cells[0].folder) == "1"


def test_a_process_that_says_it_went_well_and_left_no_result_has_failed(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, {})
    done = run_cells(grid, tmp_path, command=lambda *_: [sys.executable, "-c", ""])
    assert list(done.states.values()) == ["failed"]
    assert last_words(tmp_path / grid.cells[0].folder) == "no output"


def test_a_run_that_comes_to_a_bad_end_is_told_with_its_cause_and_its_clients(tmp_path: Path) -> None:
    """The reason is in the result: the last line of `atoll simulate` only names the folder."""
    grid = grid_of(tmp_path, {})
    folder = tmp_path / grid.cells[0].folder
    folder.mkdir(parents=True)
    round_ = line(1) | {"failures": {"a": "not_finite: NaN in w", "b": "not_finite: NaN in w"}}
    (folder / "rounds.jsonl").write_text(json.dumps(round_) + "\n")
    (folder / "result.json").write_text('{"state": "failed", "cause": "4 rounds in a row were abandoned"}')
    (folder / "log.txt").write_text("failed: ...\neverything is in there\n")
    assert last_words(folder) == "4 rounds in a row were abandoned; not_finite: NaN in w"
    (folder / "rounds.jsonl").write_text(json.dumps(line(1)) + "\n")
    (folder / "result.json").write_text('{"state": "interrupted", "cause": ""}')
    assert last_words(folder) == "everything is in there"
    run_cells(grid, tmp_path, command=lambda *_: [sys.executable, "-c", "print('atoll: the folder is in use')"])
    assert last_words(folder) == "atoll: the folder is in use"


def test_a_cell_is_a_simulation_with_its_settings(tmp_path: Path) -> None:
    settings = {"round.deadline": 30, "aggregation.rule": "median", "round.linger": 0.5, "cohort.names": ["a", "b"]}
    command = simulate(Cell({}, settings, "digits.py:task"), tmp_path)
    assert command[1:6] == ["-m", "atoll", "simulate", "digits.py:task", "--out"]
    assert command[7:] == [
        "--set=round.deadline=30",
        '--set=aggregation.rule="median"',
        "--set=round.linger=0.5",
        '--set=cohort.names=["a", "b"]',
    ]


def test_nothing_is_left_running_when_watching_raises(tmp_path: Path) -> None:
    def bad(_: Progress) -> None:
        raise ValueError("a mistake")

    grid = grid_of(tmp_path, {})
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def wait_then_bad(progress: Progress) -> None:
        if pid.exists() and pid.read_text():
            bad(progress)

    with pytest.raises(ValueError, match="a mistake"):
        run_cells(grid, tmp_path, command=lambda *_: [sys.executable, "-c", code], watch=wait_then_bad)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)

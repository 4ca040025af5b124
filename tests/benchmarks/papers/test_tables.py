"""The tables of the documentation, with fewer rounds: real simulations of twenty clients."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.protocol.settings import load_text
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import read_run
from atoll.simulations.federation.config import SimulationFile
from benchmarks.papers import codecs, robustness
from benchmarks.papers.process_pool import is_over, run_all, run_cell
from tests.process_table import descendants, is_running
from tests.waiting import BOUND_S


@pytest.mark.parametrize("cell", [*robustness.cells(), *codecs.cells()], ids=lambda cell: cell.folder)
def test_every_cell_has_settings_that_a_simulation_takes(cell: Cell) -> None:
    settings = [f"{key}={json.dumps(value)}" for key, value in cell.settings.items()]
    load_text(SimulationFile, f'task = "{cell.task}"', settings, name="")


def test_the_norm_bound_alone_holds_the_scaled_attack_where_the_mean_falls_to_chance(tmp_path: Path) -> None:
    found = {}
    for rule in ("mean", "norm bound, mean"):
        cell = robustness.cell("IID", rule, "scaled flip", rounds=30)
        run_cell(cell, tmp_path / cell.folder)
        found[rule] = robustness.accuracy(tmp_path / cell.folder)
    assert found["mean"] < 0.2  # of ten digits one is right by chance
    assert found["norm bound, mean"] > 0.85


def test_a_backdoor_takes_under_the_mean_and_shows_in_the_entry(tmp_path: Path) -> None:
    cell = robustness.cell("IID", "mean", "backdoor", rounds=15)
    run_cell(cell, tmp_path / cell.folder)
    taken = robustness.backdoor(cell, tmp_path / cell.folder)
    assert taken is not None
    assert taken > 0.5
    assert robustness.entry(cell, tmp_path).split(" / ")[1] == f"{taken:.3f}".removeprefix("0")
    assert robustness.backdoor(robustness.cell("IID", "mean", "none"), tmp_path) is None


def test_what_is_over_is_not_run_again(tmp_path: Path) -> None:
    cell = codecs.cell("sign", 1, rounds=2)
    assert list(run_all([cell], tmp_path, jobs=1)) == [cell]
    assert is_over(tmp_path / cell.folder)
    written = (tmp_path / cell.folder / "result.json").stat().st_mtime_ns
    time.sleep(0.01)
    assert list(run_all([cell], tmp_path, jobs=1)) == []
    assert (tmp_path / cell.folder / "result.json").stat().st_mtime_ns == written
    assert len(read_run(tmp_path / cell.folder).rounds) == 2


ENDLESS = """
import sys
from pathlib import Path
from benchmarks.papers import codecs
from benchmarks.papers.process_pool import run_all
if __name__ == "__main__":
    list(run_all([codecs.cell(name, 1, rounds=1_000_000) for name in ("none", "bf16")], Path(sys.argv[1]), jobs=2))
"""


def test_nothing_of_a_table_goes_on_when_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    out, environment = tmp_path / "out", {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, tmp_path / "endless.py", out], env=environment) as table:
        _wait(lambda: sum(path.stat().st_size > 0 for path in out.glob("*/rounds.jsonl")) == 2)
        begun = descendants(table.pid)
        table.kill()
    assert len(begun) >= 2
    _wait(lambda: not any(map(is_running, begun)))


def _wait(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_codec_sends_less_and_the_report_says_so(tmp_path: Path) -> None:
    moved = {}
    for codec in ("none", "bf16"):
        cell = codecs.cell(codec, 1, rounds=2)
        run_cell(cell, tmp_path / cell.folder)
        moved[codec] = read_run(tmp_path / cell.folder).rounds[-1]["bytes_up"]
    assert moved["bf16"] == pytest.approx(moved["none"] / 2, rel=0.02)

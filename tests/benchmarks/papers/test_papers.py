"""The papers' tables, with few rounds on the data that ships with scikit-learn or with the example itself."""

import json
from pathlib import Path

import numpy as np
import pytest

from atoll.protocol.settings import load_text
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import read_run
from atoll.simulations.federation.config import SimulationFile
from benchmarks.papers import fedopt, fedprox, mcmahan
from benchmarks.papers.__main__ import PAGE, PAPERS, main
from benchmarks.papers.goal import Goal
from benchmarks.papers.pages import write_parts
from benchmarks.papers.process_pool import is_over, run_cell
from examples import synthetic
from tests.public_data import needs_data


@pytest.mark.parametrize("name", PAPERS)
def test_every_cell_has_settings_that_a_simulation_takes(name: str) -> None:
    cells = PAPERS[name].cells
    assert len({cell.folder for cell in cells}) == len(cells)
    for cell in cells:
        settings = [f"{key}={json.dumps(value)}" for key, value in cell.settings.items()]
        load_text(SimulationFile, f'task = "{cell.task}"', settings, name="")


def test_the_page_has_a_part_for_each_table(tmp_path: Path) -> None:
    page = tmp_path / "papers.md"
    page.write_text(PAGE.read_text("utf-8"))
    write_parts(page, dict.fromkeys(PAPERS, "measured"))
    assert page.read_text("utf-8").count("measured\n") == len(PAPERS)


@pytest.mark.real
def test_a_run_ends_at_its_goal_and_is_not_run_again(tmp_path: Path) -> None:
    cell, goal = fedopt.cell("fedavg", 0.3, 1.0, 1, rounds=50), Goal("server/accuracy", 0.3)
    run_cell(cell, tmp_path, goal)
    report = read_run(tmp_path)
    assert report.best("server/accuracy") >= 0.3  # type: ignore[operator]
    assert len(report.rounds) < 50
    assert is_over(tmp_path, goal)
    assert not is_over(tmp_path)  # without the goal it would go on


@pytest.mark.real
def test_half_done_work_counts_under_fedprox_and_is_dropped_under_fedavg(tmp_path: Path) -> None:
    counted = {}
    for method in ("FedAvg, stragglers dropped", "FedProx, μ = 0"):
        cell = fedprox.cell("Synthetic(1, 1)", 0.9, method, rounds=2, **{"local.epochs": 2})
        run_cell(cell, tmp_path / cell.folder)
        counted[method] = sum(read_run(tmp_path / cell.folder).participation("counted")) / 2
    assert counted["FedProx, μ = 0"] == 10
    assert 1 <= counted["FedAvg, stragglers dropped"] <= 3  # of 30 devices, three are no stragglers


def test_the_rounds_of_the_paper_stand_beside_ours(tmp_path: Path) -> None:
    lines = mcmahan.table(_as_if_run(tmp_path)).splitlines()
    assert len(lines) == 2 + len(mcmahan.PAPER.cells)
    assert lines[2].startswith("| 2NN | 0.97 | 1 client | 1 | ∞ | 1 | IID | 0.5 | 1455 | 1.5 |")


def test_what_was_not_run_is_said(tmp_path: Path) -> None:
    assert mcmahan.table(tmp_path).count("| not run yet | - | - |") == len(mcmahan.PAPER.cells)


def _as_if_run(folder: Path) -> Path:
    """Write logs in which each run of the table crosses its target between its first two rounds."""
    for entry in mcmahan.entries():
        target = mcmahan.TARGETS[entry.model]
        one = folder / entry.cell.folder
        one.mkdir()
        lines = [
            {
                "round": number,
                "state": "committed",
                "virtual_s": 0,
                "real_s": 0,
                "bytes_up": 0,
                "bytes_down": 0,
                "server": {"accuracy": value},
            }
            for number, value in ((1, target - 0.01), (2, target + 0.01))
        ]
        (one / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (one / "result.json").write_text(json.dumps({"state": "interrupted"}))
    return folder


def test_the_paper_s_table_1_and_2_are_as_printed() -> None:
    """Spot checks against the paper: 87 and 664 rounds at C = 0.1, B = 10; 34 of the CNN at E = 1, B = 10, u = 60."""
    found = {(one.model, one.cohort, one.epochs, one.batch, one.split): one for one in mcmahan.entries()}
    assert found["2NN", 10, 1, "10", "IID"].rounds == 87
    assert found["2NN", 10, 1, "10", "shards"].rounds == 664
    assert found["CNN", 10, 1, "10", "IID"].rounds == 34
    assert found["CNN", 10, 1, "10", "IID"].steps == 60
    assert found["2NN", 1, 1, mcmahan.WHOLE, "IID"].steps == 1


@needs_data
def test_mnist_itself_learns_in_the_paper_s_setting(tmp_path: Path) -> None:
    cell = next(one.cell for one in mcmahan.entries() if (one.cohort, one.batch, one.split) == (10, "10", "IID"))
    run_cell(Cell(cell.varied, {**cell.settings, "rounds": 2}, cell.task), tmp_path)
    assert read_run(tmp_path).best("server/accuracy") > 0.8  # type: ignore[operator]


def test_an_unknown_paper_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["mcmahon"])
    assert "mcmahon: unknown (known: mcmahan, fedprox, fedopt)" in capsys.readouterr().err


def test_synthetic_devices_differ_and_the_iid_ones_share_a_model() -> None:
    """A linear model of half of the devices fits the other half only if all devices share a model."""
    lost = {}
    for name, which in {"differ": (1.0, 1.0, False), "iid": (0.0, 0.0, True)}.items():
        parts = synthetic.devices(*which)
        assert len(parts) == 30
        assert all(50 <= len(labels) <= synthetic.SIZE_MAX for _, labels in parts)
        (seen, labels), (unseen, others) = _pooled(parts[:15]), _pooled(parts[15:])
        weights, *_ = np.linalg.lstsq(seen, np.eye(10)[labels], rcond=None)
        scores = [(inputs @ weights).argmax(axis=1) == right for inputs, right in ((seen, labels), (unseen, others))]
        lost[name] = float(scores[0].mean() - scores[1].mean())
    assert lost["iid"] < 0.1
    assert lost["differ"] > 0.3


def _pooled(parts: list[synthetic.Examples]) -> synthetic.Examples:
    inputs, labels = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    return np.column_stack([inputs, np.ones(len(labels))]), labels

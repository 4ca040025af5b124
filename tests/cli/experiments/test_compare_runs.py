"""`atoll compare DIR...`: runs that there are, of any mode, in one table."""

import csv
import io
from pathlib import Path

import pytest

from tests.cli.invoking import invoke, refused, said, shown
from tests.simulations.experiments.runs import line, write_run


def a_run(folder: Path, mode: str, seed: int, accuracies: list[float], counted: int) -> Path:
    lines = [line(k, server={"accuracy": value}, counted=counted) for k, value in enumerate(accuracies, start=1)]
    write_run(folder, lines)
    (folder / "run.toml").write_text(f'name = "{folder.name}"\nseed = {seed}\n[round]\nmode = "{mode}"\n')
    return folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "sync-1", "sync", 1, [0.2, 0.4], 10)
    a_run(tmp_path / "sync-2", "sync", 2, [0.4, 0.8], 10)
    a_run(tmp_path / "async", "fedasync", 1, [0.1, 0.2, 0.3, 0.5], 4)
    return ["sync-1", "sync-2", "async"]


def test_runs_that_differ_in_the_seed_are_one_row_and_modes_are_compared_by_updates(folders: list[str]) -> None:
    found = shown("compare", *folders, "--by", "updates", "--target", 0.4, "--no-plot")
    assert (found["metric"], found["by"], found["common"]) == ("server/accuracy", "updates", 16)
    first, second = found["rows"]
    assert (first["varied"], first["over"]) == ({"run": "sync-1"}, {"seed": ["1", "2"]})
    assert first["values"]["at_common"] == pytest.approx({"mean": 0.3, "std": 0.02**0.5, "n": 2, "of": 2})
    assert first["values"]["updates_to_target"]["mean"] == 15  # 20 and 10
    assert second["values"]["at_common"] == {"mean": 0.5, "std": None, "n": 1, "of": 1}
    assert second["values"]["updates_to_target"]["mean"] == 16


@pytest.mark.slow
def test_a_person_gets_a_table_and_plots(folders: list[str], tmp_path: Path) -> None:
    result = invoke("compare", *folders, "--by", "bytes")
    assert result.exit_code == 0
    header, sync, _ = result.stdout.splitlines()
    assert header.startswith("run     server/accuracy at 3,400 bytes  final server/accuracy")
    assert sync.split() == ["sync-1", "0.6", "±", "0.2828", "0.6", "±", "0.2828", "0.6", "±", "0.2828", "1,", "2"]
    assert {path.stem for path in (tmp_path / "atoll-compare-runs").iterdir()} >= {"comparison", "metrics", "overview"}
    assert result.stderr == "plots are in atoll-compare-runs\n"


def test_columns_are_chosen_and_a_script_gets_csv(folders: list[str]) -> None:
    text = said("compare", *folders, "--columns", "updates,best@server/accuracy", "--csv", "--no-plot")
    table = list(csv.DictReader(io.StringIO(text)))
    assert [(row["run"], row["seed"], row["updates"], row["updates_n"]) for row in table] == [
        ("sync-1", "1 2", "20.0", "2"),
        ("async", "1", "16.0", "1"),
    ]


def test_what_cannot_be_compared_is_refused(folders: list[str], tmp_path: Path) -> None:
    assert refused("compare", *folders, "--by", "epochs") == [
        "--by: got 'epochs'; allowed: updates, bytes, time, rounds, seconds"
    ]
    assert refused("compare", *folders, "--csv", "--json")[0].startswith("--csv and --json exclude each other")
    assert refused("compare", *folders, "--rounds", 3)[0].startswith("--rounds: nothing is trained for folders of runs")
    (metric,) = refused("compare", *folders, "--metric", "server/f1")
    assert metric.endswith("the runs measure server/accuracy, train/loss")
    assert refused("compare", "sync-1", "sync-1")[0] == "sync-1: is named twice: leave one out"
    (tmp_path / "empty").mkdir()
    assert refused("compare", "sync-1", "empty")[0].startswith("empty: has no rounds.jsonl; allowed: a folder that")
    assert refused("compare", "t.py:task", "--by", "bytes") == [
        "--by applies only to folders of simulated runs: leave it out, or name such folders"
    ]
    assert refused("compare", "sync-1", "t.py:task")[0].startswith("got sync-1 t.py:task; allowed: one task or TOML")

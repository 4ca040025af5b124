"""The facts of sites that a later process takes from a file, and all that lets it read them anew."""

import io
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.simulations.federation.kept_facts import KeptFacts
from atoll.simulations.populations.facts import Facts
from atoll.simulations.populations.opened_files import OPENED

SITES = [f"s{number:02}" for number in range(40)]

TASK = """
import os
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from atoll import Local, Task

HERE = Path(__file__).parent

def data(site, split):
    if split == "test":
        return None
    labels = [int(word) for word in (HERE / "data" / f"{site}.txt").read_text().split()]
    return TensorDataset(torch.ones(len(labels), 2), torch.tensor(labels))

task = Task(model=lambda: nn.Linear(2, 3), data=data, loss=nn.functional.cross_entropy, local=Local(batch_size=4),
            sites=[f"s{number:02}" for number in range(40)])
"""


def written(folder: Path, sizes: dict[str, int] | None = None) -> Path:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for number, site in enumerate(SITES):
        size = (sizes or {}).get(site, 1 + number % 3)
        (folder / "data" / f"{site}.txt").write_text(" ".join(str(k % 3) for k in range(size)))
    return folder


class FromFiles:
    """Data in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, site: str, split: str) -> TensorDataset | None:
        if split == "test":
            return None
        labels = [int(word) for word in (self.folder / "data" / f"{site}.txt").read_text().split()]
        return TensorDataset(torch.ones(len(labels), 2), torch.tensor(labels))


def task_of(folder: Path) -> Task:
    return Task(
        model=lambda: nn.Linear(2, 3),
        data=FromFiles(folder),
        loss=nn.functional.cross_entropy,
        sites=SITES,
        local=Local(),
        options={"factor": 1.0},
    )


def read(folder: Path, task: Task) -> Facts:
    kept = KeptFacts(folder)
    facts = kept.read(task)
    kept.save()
    return facts


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    OPENED.watch()
    monkeypatch.setattr(OPENED, "_paths", {})  # what other tests have opened, as the folder of temporary files, changes
    (tmp_path / "out").mkdir()
    return written(tmp_path / "task"), tmp_path / "out"


def test_the_second_time_the_facts_come_from_the_file(folders: tuple[Path, Path]) -> None:
    files, out = folders
    first, second = (read(out, task_of(files)) for _ in range(2))
    assert not first.are_kept
    assert second.are_kept
    assert second.train.tolist() == first.train.tolist() == [1 + number % 3 for number in range(40)]
    assert second.test.tolist() == [0] * 40
    assert second.labels == first.labels
    assert second.labels[2] == ([0, 1, 2], [1, 1, 1])


def test_a_changed_file_of_any_site_is_seen(folders: tuple[Path, Path]) -> None:
    """Of 40 sites some 20 are read again to compare; this is another one."""
    files, out = folders
    read(out, task_of(files))
    for site in ("s07", "s01"):
        (files / "data" / f"{site}.txt").write_text("0 0 1 1 2")
        found = read(out, task_of(files))
        assert not found.are_kept
        assert found.train[SITES.index(site)] == 5
        assert read(out, task_of(files)).are_kept


def test_a_changed_file_of_the_same_size_and_time_is_seen(folders: tuple[Path, Path]) -> None:
    files, out = folders
    read(out, task_of(files))
    file = files / "data" / "s05.txt"
    before = file.stat()
    file.write_text("2 2 2")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    found = read(out, task_of(files))
    assert not found.are_kept
    assert found.labels[5] == ([2], [3])


def test_options_sites_environment_and_seen_absences_count(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, out = folders
    read(out, task_of(files))
    assert not read(out, task_of(files).with_options({"factor": 2.0})).are_kept
    assert not read(out, replace(task_of(files), sites=SITES[:-1])).are_kept
    assert read(out, task_of(files)).are_kept  # each has a file of its own
    monkeypatch.setenv("SOME_PATH", "elsewhere")
    assert not read(out, task_of(files)).are_kept
    monkeypatch.setenv("COLUMNS", "33")
    assert read(out, task_of(files)).are_kept


def test_a_source_that_no_file_shows_is_compared_by_some_sites(folders: tuple[Path, Path]) -> None:
    """Data that a library of C reads, or that a process makes, are seen by no watch."""
    files, out = folders
    sizes = {"s00": 3}

    def data(site: str, split: str) -> TensorDataset | None:
        size = sizes.get(site, 2)
        return None if split == "test" else TensorDataset(torch.ones(size, 2), torch.zeros(size, dtype=torch.long))

    task = replace(task_of(files), data=data)
    read(out, task)
    assert read(out, task).are_kept
    sizes["s00"] = 4
    assert read(out, task).train[0] == 4


def test_a_damaged_file_is_read_anew(folders: tuple[Path, Path]) -> None:
    files, out = folders
    first = read(out, task_of(files))
    (kept,) = out.glob("sites-*.npz")
    whole = kept.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"x" * 100):
        kept.write_bytes(damaged)
        found = read(out, task_of(files))
        assert not found.are_kept
        assert found.train.tolist() == first.train.tolist()


def simulate(folder: Path, out: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "atoll", "simulate", "task.py:task", "--rounds", "1", "--out", str(out)]
    settings = ["--set", "simulation.engine=sequential", "--set", "round.cohort_size=40", *arguments]
    return subprocess.run(
        [*command, *settings], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_cells_of_a_sweep_share_what_they_have_read(tmp_path: Path) -> None:
    files = written(tmp_path)
    (files / "task.py").write_text(TASK)
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    shared = {"ATOLL_SITES": str(sweep)}
    done = simulate(files, sweep / "one", **shared)
    assert done.returncode == 0, done.stderr
    assert len([*sweep.glob("sites-*.npz")]) == 1
    assert not [*(sweep / "one").glob("sites-*")]
    again = simulate(files, sweep / "two", "--set", "seed=5", **shared)
    assert again.returncode == 0, again.stderr
    populations = [json.loads((sweep / cell / "population.json").read_text()) for cell in ("one", "two")]
    assert populations[0]["clients"] == populations[1]["clients"]

    (kept,) = sweep.glob("sites-*.npz")
    arrays = dict(np.load(io.BytesIO(kept.read_bytes())))
    arrays["train"][1] = 7  # of a site that is not among those that are read again
    np.savez(kept, **arrays)
    wrong = simulate(files, sweep / "three", **shared)
    assert wrong.returncode == 2
    said = "site 's01' has trained on 2 examples, and had 7 when the sites were counted, so its data has changed"
    assert said in " ".join(wrong.stderr.split())

    (files / "data" / "s00.txt").write_text("0 1 2 0 1 2")
    last = simulate(files, sweep / "four", **shared)
    assert last.returncode == 0, last.stderr
    assert json.loads((sweep / "four" / "population.json").read_text())["clients"][0]["examples"] == 6


def test_cells_that_save_the_same_facts_at_once_all_succeed(tmp_path: Path) -> None:
    """The file under construction has one name: of two writers the second one found it gone, and its cell failed."""
    facts = Facts(np.ones(1, np.int64), np.zeros(1, np.int64), (None,), ("x",))

    def save(_: int) -> None:
        kept = KeptFacts(tmp_path)
        kept._to_save = "k" * 64, facts
        kept.save()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(80)))
    assert [path.name for path in tmp_path.iterdir()] == [f"sites-{'k' * 16}.npz"]

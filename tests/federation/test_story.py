"""The operator's story of `examples/hospitals`: four CSV files, the view of each site, an early stop, a warm start."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from atoll.task.randomness import data_of
from atoll.task.task import load_task
from atoll.tensors import safetensors_file
from atoll.training.model.parameters import load_parameters
from benchmarks.processes import free_address
from tests.federation.processes import ATOLL
from tests.later import later
from tests.pages.due import when_due
from tests.waiting import BOUND_S

sklearn = later("sklearn.metrics")

HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals"
USERS_OWN = ("task.py", "run.toml", "story.sh")
"""The files that a consortium writes; `make_csv.py` stands for the data that it has."""


def shown(folder, *command):
    return json.loads(subprocess.check_output([ATOLL, *command, "--json"], cwd=folder, text=True))


def scores_of(task, path):
    """Return the binned scores and the targets of each hospital's own test data, by a model in a file."""
    model = task.model().eval()
    load_parameters(model, safetensors_file.read(path))
    found = {}
    for site in task.sites:
        inputs, targets = data_of(task, site, "test").tensors
        with torch.no_grad():
            found[site] = (torch.sigmoid(model(inputs)) * 100).long().clamp(max=99), targets
    return found


def executed(command, environment):
    """Run a script in a process group of its own, which ends with it; return its output."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        told, _ = process.communicate(timeout=4 * BOUND_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    assert process.returncode == 0, told
    return told


@pytest.mark.slow
@pytest.mark.parametrize("folder", [when_due(HOSPITALS, page="examples/hospitals", number=4, id="hospitals")])
def test_the_story_ends_as_its_page_says_and_its_auc_is_scikit_learns(folder, tmp_path):
    environment = {**os.environ, "ADDRESS": free_address(), "PATH": f"{Path(ATOLL).parent}:{os.environ['PATH']}"}
    told = executed(["bash", folder / "story.sh", tmp_path], environment)
    first, second = (shown(tmp_path, "run", "show", run) for run in ("hospitals-1", "second-1"))
    changed = first["changes"][0]
    stopped = changed["round"] - 1
    assert changed["values"]["local.lr"] == {"before": None, "after": 0.02}
    assert first["version"] == stopped + 10
    assert stopped < 60, "the first part has ended early"
    assert "worst" in told
    sites = shown(tmp_path, "run", "show", "hospitals-1", "--sites")["evaluation"]
    assert sites["version"] == first["version"]

    task = load_task(f"{folder / 'task.py'}:task")
    task = task.with_site_settings({site: {"file": str(tmp_path / f"{site}.csv")} for site in task.sites})
    last = tmp_path / "last.safetensors"
    export = [ATOLL, "model", "export", "--run", "hospitals-1", "--out", last]
    subprocess.run(export, cwd=tmp_path, check=True)
    scores = scores_of(task, last)
    for site, (bins, targets) in scores.items():
        assert sites["sites"][site]["auc"] == pytest.approx(sklearn.roc_auc_score(targets, bins), abs=1e-9), site
    bins, targets = (torch.cat(column) for column in zip(*scores.values(), strict=True))
    merged = first["metrics"][str(first["version"])]["clients"]["auc"]
    assert merged == pytest.approx(sklearn.roc_auc_score(targets, bins), abs=1e-9), (
        "of all patients, not a mean of sites"
    )

    best = first["best"]["value"]
    assert best >= merged
    begun = safetensors_file.read(tmp_path / "atoll-state" / "runs" / "second-1" / "versions" / "000000.safetensors")
    of_best = tmp_path / "of-best.safetensors"
    subprocess.run([*export[:-1], of_best, "--best"], cwd=tmp_path, check=True)
    expected = safetensors_file.read(of_best)
    assert all((begun[name] == array).all() for name, array in expected.items())
    assert second["version"] == 3


def test_the_users_own_part_is_short():
    assert sum(len((HOSPITALS / name).read_text().splitlines()) for name in USERS_OWN) < 150

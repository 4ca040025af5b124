"""Three apps as their authors write them, each unmodified: by Flower itself, hosted, and where it can be natively.

Two nodes, so that the order of a sum does not matter and equal arithmetic gives equal bits.
"""

import json
import subprocess
import venv

import numpy as np
import pytest
import torch

from tests.federation.flower.stock import run_by_flower
from tests.federation.flower.test_flower_apps import EXAMPLES, OfAnApp
from tests.federation.processes import ATOLL, ended_after

pytestmark = [pytest.mark.long, pytest.mark.real, pytest.mark.timeout(1200)]
TOLERANCE = 1e-6


def run_here(app, out, *options, **config):
    """Run an app by `atoll flower run`, and return the folder in which main() left its files."""
    overrides = [part for name, value in config.items() for part in ("--set", f"task.{name}={value}")]
    command = [ATOLL, "flower", "run", app, "--nodes", "2", "--out", out, *options, *overrides]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = {path.parent for name in ("final_model.pt", "model.npz", "history.json") for path in out.rglob(name)}
    return folder


def test_pytorch_with_batch_norm(tmp_path):
    app, rounds = EXAMPLES / "quickstart", {"num-server-rounds": 6}
    run_by_flower(app, tmp_path / "flower", 2, **rounds)
    theirs = torch.load(tmp_path / "flower" / "final_model.pt")
    hosted = run_here(app, tmp_path / "hosted", **rounds)
    found = torch.load(hosted / "final_model.pt")
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        name: (value.dtype, value.shape) for name, value in theirs.items()
    }
    assert all(torch.equal(found[name], value) for name, value in theirs.items())
    for options in (("--native",), ("--native", "--simulate")):
        native = run_here(app, tmp_path / f"native{len(options)}", *options, **rounds)
        of_rounds = torch.load(native / "final_model.pt")
        assert distances(of_rounds, theirs) == pytest.approx(dict.fromkeys(theirs, 0.0), abs=TOLERANCE)


def distances(found, expected):
    """|found - expected| / |expected| of each tensor."""
    return {
        name: float((found[name].double() - value.double()).norm() / value.double().norm())
        for name, value in expected.items()
    }


def test_a_numpy_client_of_scikit_learn_in_an_environment_without_torch(tmp_path):
    app = EXAMPLES / "numpy_client"
    run_by_flower(app, tmp_path / "flower", 2)
    site = tmp_path / "site"
    venv.create(site, with_pip=True)
    python = site / "bin" / "python"
    packages = ["numpy", "safetensors", "flwr==1.42.0", "scikit-learn"]
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    assert subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 1
    folder = tmp_path / "hosted"
    folder.mkdir()
    with ended_after(OfAnApp(folder, task=str(app))) as it:
        it.coordinator(**{"round.cohort_size": 2, "round.quorum": 1, "round.min_available": 2})
        it.wait_for(lambda: (it.state / "coordinator.json").exists())
        it.agents(2, python=f'"{python}"')
        assert it.wait_for_end() == 0, it.log("coordinator")
        found = np.load(it.state / "runs" / "trouble-1" / "program" / "model.npz")
    theirs = np.load(tmp_path / "flower" / "model.npz")
    simulated = np.load(run_here(app, tmp_path / "simulated", "--simulate") / "model.npz")
    for ours in (found, simulated):
        assert [ours[name].tobytes() for name in ours] == [theirs[name].tobytes() for name in theirs]
    assert np.abs(found["arr_0"]).sum() > 1


def test_a_loop_of_its_own_with_mods_lifespan_queries_and_state(tmp_path):
    app = EXAMPLES / "own_loop"
    run_by_flower(app, tmp_path / "flower", 2)
    for options in ((), ("--simulate",)):
        hosted = run_here(app, tmp_path / f"hosted{len(options)}", *options)
        found = json.loads((hosted / "history.json").read_text())
        assert found == json.loads((tmp_path / "flower" / "history.json").read_text())
    assert [line["calls"] for line in found] == [[n, n] for n in (1, 2, 3, 4)]


@pytest.mark.parametrize(("app", "file"), [("own_loop", "history.json"), ("numpy_client", "model.npz")])
def test_agents_give_what_supernodes_give(app, file, tmp_path):
    """A coordinator and two agents, a SuperLink and two SuperNodes: all processes of a deployment on both sides."""
    run_by_flower(EXAMPLES / app, tmp_path / "flower", 2, simulates=False)
    hosted = run_here(EXAMPLES / app, tmp_path / "hosted")
    assert content(hosted / file) == content(tmp_path / "flower" / file)


def content(file):
    """Return the JSON of a file, or the bits of its arrays."""
    if file.suffix == ".json":
        return json.loads(file.read_text())
    arrays = np.load(file)
    return {name: arrays[name].tobytes() for name in arrays}

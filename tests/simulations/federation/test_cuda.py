"""Whole simulated runs on a GPU, whose models are those of the CPU. `make test-cuda` runs this."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.mesh_client import tasks
from tests.simulations.federation.simulating import TASK, model, simulate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-cuda")

ROUNDS = 3
SETTINGS = (f"rounds={ROUNDS}", "round.cohort_size=2")
TASKS = {"line": TASK, "decoder": f"{tasks.__file__}:task", "pictures": f"{tasks.__file__}:pictures"}


@pytest.mark.parametrize("engine", ["sequential", "batched", "auto"])
@pytest.mark.parametrize("task", TASKS)
def test_the_model_is_that_of_the_cpu(task: str, engine: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, "simulation.workers=1"]
    if task == "pictures":
        settings[1] = "round.cohort_size=1"
    for device, chosen in (("cpu", "sequential"), ("cuda", engine)):
        place = (f"simulation.device={device}", f"simulation.engine={chosen}")
        simulate(tmp_path / device, *settings, *place, task=TASKS[task])
    expected = model(tmp_path / "cpu", ROUNDS)
    for name, array in model(tmp_path / "cuda", ROUNDS).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


REPEATED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from atoll import Local, Task
from tests.parallel.models.cnn import CNN
from atoll.parallel.models.decoder import Decoder, DecoderConfig

KIND = {kind!r}
if KIND == "strict":
    torch.use_deterministic_algorithms(True)
def make():
    if KIND == "images":
        return CNN([3, 32, 64], 32, hidden=128)
    if KIND == "words":
        return nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 64))
    return Decoder(DecoderConfig(vocab=64, dim=256, layers=2, heads=4, sequence=512))
def data(site, split):
    generator = torch.Generator().manual_seed(ord(site))
    if KIND == "images":
        return TensorDataset(torch.randn(96, 3, 32, 32, generator=generator), torch.arange(96) % 10)
    words = torch.randint(64, (32, 512), generator=generator)
    return TensorDataset(words, words.roll(1))
task = Task(
    model=make,
    data=data,
    sites=["a", "b"],
    loss=lambda outputs, targets: nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten()),
    local=Local(batch_size=32, lr=0.1),
)
"""
"""A task whose gradients differ from run to run on a GPU by torch's defaults; attention does unless told strictly."""


@pytest.mark.parametrize("kind", ["images", "words", "strict"])
def test_a_run_that_is_repeated_has_the_same_bits(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    (tmp_path / "task.py").write_text(REPEATED.format(kind=kind))
    settings = [*SETTINGS, "simulation.device=cuda", "simulation.engine=sequential"]
    models = []
    try:
        for name in ("first", "second"):
            simulate(tmp_path / name, *settings, task=f"{tmp_path / 'task.py'}:task")
            models.append(model(tmp_path / name, ROUNDS))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, array in models[0].items():
        np.testing.assert_array_equal(array, models[1][name], err_msg=name)

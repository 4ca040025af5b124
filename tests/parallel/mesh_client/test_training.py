"""The local training on a mesh against that of one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset

from atoll.tensors import safetensors_file
from tests.parallel.mesh_client import tasks
from tests.parallel.mesh_client.clients import Arrays, Json, distance, in_one_process, on_a_mesh, write_version

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 4},
    "fsdp, accumulated": {"dp_shard": 2, "accumulate": 2},
    "zero 1": {"dp_shard": 2, "zero": 1},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"tp": 2},
    "loss parallel": {"tp": 2, "loss_parallel": True},
    "fsdp x tp": {"dp_shard": 2, "tp": 2},
    "pp": {"pp": 2},
    "pp x fsdp": {"pp": 2, "dp_shard": 2},
    "pp x tp": {"pp": 2, "tp": 2},
    "recompute": {"dp_shard": 2, "recompute": "full"},
}

ALGORITHMS: dict[str, Json] = {
    "fedavg": {},
    "fedsgd": {"local": {"batch_size": None, "epochs": 1}},
    "fedprox": {"local": {"prox_mu": 0.3, "clip_norm": 0.5}},
    "fednova": {"algorithm": "fednova", "local": {"momentum": 0.5}},
    "scaffold": {"algorithm": "scaffold", "local": {"lr": 0.1}},
}

SHORT = {("ddp", "fedprox"), ("fsdp", "fedavg"), ("tp", "fednova"), ("pp x fsdp", "scaffold")}
"""The cases of `make test`: each kind of layout and of algorithm once."""

CASES = [
    pytest.param(layout, algorithm, marks=[] if (layout, algorithm) in SHORT else [pytest.mark.long])
    for layout in LAYOUTS
    for algorithm in ALGORITHMS
]


@pytest.mark.real
@pytest.mark.parametrize(("layout", "algorithm"), CASES)
def test_a_training_is_that_of_one_process(layout: str, algorithm: str, tmp_path: Path) -> None:
    fields = dict(ALGORITHMS[algorithm])
    load = {"algorithm": fields.get("algorithm", "fedavg")}
    write_version(tmp_path, **load)
    expected, update = in_one_process(tmp_path, load=load, **fields)
    answer, found = on_a_mesh(tmp_path, LAYOUTS[layout], load=load, **fields)
    assert distance(found, update) < 1e-6
    for key in ("num_examples", "work", "steps", "stopped", "has_own"):
        assert answer[key] == expected[key], key
    assert {key: answer.get(key) for key in ("normalizer", "effective_steps")} == {
        key: expected.get(key) for key in ("normalizer", "effective_steps")
    }
    assert answer["statistics"]["right"] == expected["statistics"]["right"]
    assert answer["statistics"]["loss"] == pytest.approx(expected["statistics"]["loss"], rel=5e-6)
    assert answer["description"] == expected["description"]
    evaluations = [of["evaluation"]["statistics"] for of in (answer, expected)]
    assert evaluations[0]["right"] == evaluations[1]["right"]
    assert evaluations[0]["loss"] == pytest.approx(evaluations[1]["loss"], rel=5e-6)
    if expected["has_own"]:
        stored = [safetensors_file.read(tmp_path / f"{which}.own") for which in ("mesh", "one")]
        assert distance(*stored) < 1e-6


@pytest.mark.real
@pytest.mark.long
def test_bf16_moves_float32_masters(tmp_path: Path) -> None:
    write_version(tmp_path)
    _, update = in_one_process(tmp_path)
    _, found = on_a_mesh(tmp_path, {"dp_shard": 2, "precision": "bf16"})
    assert 1e-6 < distance(found, update) < 0.05
    assert all(array.dtype == "float32" for array in found.values())
    bits = [array.view("uint32") & 0xFFFF for array in found.values()]
    assert any(low.any() for low in bits), "an update of bfloat16 masters would have no low bits"


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("options", [{"dp_shard": 2}, {"dp_replicate": 2}])
def test_synchronized_batch_norms_are_those_of_one_process(options: Json, tmp_path: Path) -> None:
    write_version(tmp_path, "pictures")
    _, update = in_one_process(tmp_path, name="pictures")
    _, found = on_a_mesh(tmp_path, {**options, "batchnorm": "sync"}, name="pictures")
    assert distance(found, update) < 2e-6


LARGE_LR = 16.0
"""So that a difference of float32 weights is large beside their rounding."""


@pytest.mark.real
def test_fedsgd_of_a_mesh_and_two_plain_clients_is_a_step_on_all_their_examples(tmp_path: Path) -> None:
    """McMahan et al. 2017, section 2: with C = 1 and one full batch, FedSGD is gradient descent on the pooled data."""
    fields: Json = {"name": "three_sites", "local": {"batch_size": None, "epochs": 1, "lr": LARGE_LR}}
    write_version(tmp_path, "three_sites")
    weight, total = 0, {}
    for site in tasks.three_sites.sites:
        train = in_one_process if site != "bb" else partial(on_a_mesh, options={"dp_shard": 2})
        (folder := tmp_path / site).mkdir()
        (folder / "version").symlink_to(tmp_path / "version")
        answer, update = train(folder, load={"site": site}, **fields)
        weight += answer["num_examples"]
        total = {
            name: total.get(name, 0) + answer["num_examples"] * value.astype(float) for name, value in update.items()
        }
    begun = safetensors_file.read(tmp_path / "version")
    pooled = ConcatDataset([tasks.sequences(site, "train") for site in tasks.three_sites.sites])
    expected = step_on(begun, pooled)
    assert weight == sum(int((targets != -100).sum()) for _, targets in pooled)
    assert distance({name: value / weight for name, value in total.items()}, expected) < 1e-6


def step_on(begun: Arrays, examples: Dataset[Any]) -> Arrays:
    """Return the difference that one step of gradient descent makes, by torch alone."""
    model = tasks.decoder()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in begun.items()})
    inputs, targets = (torch.stack(column) for column in zip(*examples, strict=True))
    tasks.loss(model(inputs), targets).backward()
    return {name: (-LARGE_LR * parameter.grad).numpy() for name, parameter in model.named_parameters()}

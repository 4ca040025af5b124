"""The local training of one process and of a crew over NCCL, on a GPU, against the CPU. `make test-cuda` runs this."""

from pathlib import Path

import pytest
import torch

from atoll.parallel.mesh_client.needs import needs_of_ranks
from atoll.parallel.world import World, process_group
from atoll.tensors import safetensors_file
from tests.parallel.mesh_client import tasks
from tests.parallel.mesh_client.clients import (
    Arrays,
    Json,
    distance,
    in_one_process,
    on_a_rank,
    plan_of,
    request_of,
    update_in,
    write_version,
)
from tests.parallel.mesh_client.test_training import ALGORITHMS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-cuda")

KEPT: Json = {"local": {"optimizer": "adamw", "lr": 0.01, "keep_optimizer": True}}
CASES = {**ALGORITHMS, "kept optimizer": KEPT}


def on_the_gpu(folder: Path, options: Json, *, load: Json, **fields: object) -> tuple[Json, Arrays]:
    """Train on a mesh of one rank, as rank 0 of a crew does."""
    with process_group(World(), "cuda"):
        answer = on_a_rank("task", options, load | {"device": "cuda"}, request_of(folder, "mesh", **fields))
    return answer, update_in(folder / "mesh", answer["parts"])


@pytest.mark.parametrize("algorithm", CASES)
def test_a_local_training_is_that_of_the_cpu(algorithm: str, tmp_path: Path) -> None:
    fields = dict(CASES[algorithm])
    load = {"algorithm": fields.get("algorithm", "fedavg")}
    write_version(tmp_path, **load)
    on_cpu, expected = in_one_process(tmp_path, load=load, **fields)
    stored = safetensors_file.read(tmp_path / "one.own") if on_cpu["has_own"] else {}
    for where, trained in (
        ("one", lambda: in_one_process(tmp_path, load=load | {"device": "cuda"}, **fields)),
        ("mesh", lambda: on_the_gpu(tmp_path, {"dp_shard": 1, "zero": 3}, load=load, **fields)),
    ):
        answer, update = trained()
        assert distance(update, expected) < 1e-5, where
        assert answer["evaluation"]["statistics"]["loss"] == pytest.approx(
            on_cpu["evaluation"]["statistics"]["loss"], rel=1e-5
        )
        assert answer["has_own"] == on_cpu["has_own"]
        if stored:
            assert distance(safetensors_file.read(tmp_path / f"{where}.own"), stored) < 1e-4


def test_bf16_is_near_and_its_masters_are_float32(tmp_path: Path) -> None:
    write_version(tmp_path)
    _, expected = in_one_process(tmp_path)
    _, update = on_the_gpu(tmp_path, {"dp_shard": 1, "zero": 3, "precision": "bf16"}, load={})
    assert 1e-6 < distance(update, expected) < 0.05
    assert all(array.dtype == "float32" for array in update.values())


def test_the_peak_is_that_of_the_allocator_and_at_least_what_check_says(tmp_path: Path) -> None:
    write_version(tmp_path)
    options: Json = {"dp_shard": 1, "zero": 3}
    [needs] = needs_of_ranks(tasks.task, tasks.task.local, plan_of(options))
    answer, _ = on_the_gpu(tmp_path, options, load={})
    assert needs.peak <= answer["mesh"]["peak_bytes"] <= torch.cuda.max_memory_allocated()

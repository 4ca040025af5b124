"""The training of a task of which a part alone travels: on a mesh as in one process, and over the same base."""

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.mesh_client.bench import MeshBench
from atoll.parallel.world import World
from atoll.task.errors import TaskBroken
from atoll.tensors import safetensors_file
from tests.parallel.mesh_client import adapter_tasks
from tests.parallel.mesh_client.clients import (
    Json,
    distance,
    in_one_process,
    on_a_mesh,
    plan_of,
    request_of,
    write_version,
)
from tests.turns import in_turn

LAYOUTS: dict[str, Json] = {
    "ddp": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 3},
    "zero 2": {"dp_shard": 2, "zero": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"tp": 2},
    "fsdp x tp": {"dp_shard": 2, "tp": 2},
    "pp": {"pp": 2},
    "pp x fsdp": {"pp": 2, "dp_shard": 2},
    "pp x tp": {"pp": 2, "tp": 2},
    "recompute": {"dp_shard": 2, "recompute": "full"},
}
OF_DATA = ("ddp", "fsdp", "zero 2", "hsdp", "recompute")
CASES = [
    *(("part_of_decoder", layout) for layout in LAYOUTS if layout != "pp x tp"),
    *(("drawn", layout) for layout in ("ddp", "fsdp", "pp x fsdp")),
    *(("lora_on_llama", layout) for layout in (*OF_DATA, "tp", "fsdp x tp", "pp", "pp x fsdp", "pp x tp")),
    *(("lora_without_a", layout) for layout in ("ddp", "fsdp", "tp", "pp")),
    *((name, layout) for name in ("lora_on_gpt2", "whole_gpt2") for layout in ("fsdp", "pp", "pp x fsdp")),
]
SHORT = [("part_of_decoder", "pp x fsdp"), ("lora_on_llama", "fsdp"), ("drawn", "fsdp"), ("whole_gpt2", "pp")]

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]


def loaded(name: str, folder: Path, **fields: Any) -> Json:
    """Return the fields of the request to load a task, whose base is written."""
    write = adapter_tasks.tasks[name]
    return {"settings": {"base": str(write(folder / "base"))} if write else {}, **fields}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(in_turn(*case, number=number, days=2) for number, case in enumerate(SHORT)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in CASES if case not in SHORT),
    ],
)
def test_a_part_that_travels_is_trained_as_in_one_process(name: str, layout: str, tmp_path: Path) -> None:
    load = loaded(name, tmp_path)
    frozen = write_version(tmp_path, name, **load)
    fields = {"local": {"model.frozen": frozen}, "model_seed": 3}
    expected, update = in_one_process(tmp_path, name=name, load=load, **fields)
    answer, found = on_a_mesh(tmp_path, LAYOUTS[layout], name=name, load=load, **fields)
    assert update.keys() == safetensors_file.read(tmp_path / "version").keys()
    assert distance(found, update) < 1e-6
    assert answer["description"] == expected["description"]
    evaluations = [of["evaluation"]["statistics"]["loss"] for of in (answer, expected)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=5e-6)


@pytest.mark.parametrize(
    "layout", ["tp", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp", "pp x fsdp"))]
)
def test_layers_that_stay_at_the_site_begin_with_the_values_of_the_base(layout: str, tmp_path: Path) -> None:
    name = "kept_in_base"
    load = loaded(name, tmp_path)
    frozen = write_version(tmp_path, name, **load)
    fields = {"local": {"model.frozen": frozen}, "model_seed": 3}
    _, update = in_one_process(tmp_path, name=name, load=load, **fields)
    _, found = on_a_mesh(tmp_path, LAYOUTS[layout], name=name, load=load, **fields)
    assert distance(found, update) < 1e-6
    kept, expected = (safetensors_file.read(tmp_path / f"{which}.own") for which in ("mesh", "one"))
    assert any("layers.1." in tensor for tensor in kept)
    assert distance(kept, expected) < 1e-6


@pytest.mark.parametrize("options", [{"dp_shard": 2}, pytest.param({"dp_replicate": 2}, marks=pytest.mark.long)])
def test_another_base_is_refused_on_a_mesh_with_the_digests_of_one_process(options: Json, tmp_path: Path) -> None:
    right = loaded("part_of_decoder", tmp_path)
    frozen = write_version(tmp_path, "part_of_decoder", **right)
    other = {"settings": {"base": str(adapter_tasks.write_decoder(tmp_path / "other", seed=6))}}
    fields: Json = {"local": {"model.frozen": frozen}, "model_seed": 3}
    with pytest.raises(AssertionError, match=r"their digest is ([0-9a-f]{64}) at here") as alone:
        in_one_process(tmp_path, name="part_of_decoder", load=other, **fields)
    with pytest.raises(RankFailed, match=rf"and {frozen} in the run") as on_ranks:
        on_a_mesh(tmp_path, options, name="part_of_decoder", load=other, **fields)
    (digest,) = re.findall("their digest is ([0-9a-f]{64}) at here", str(alone.value))
    assert f"their digest is {digest} at here" in str(on_ranks.value)


def a_bench(name: str, folder: Path) -> tuple[MeshBench, Json]:
    """A bench of one rank, and its request to train and to evaluate."""
    write_version(folder, name)
    bench = MeshBench(getattr(adapter_tasks, name), {"site": "here"}, plan_of({}), World())
    return bench, request_of(folder, "out", split="test")


def test_a_frozen_buffer_that_changes_once_is_refused_after_one_step_in_each_training(tmp_path: Path) -> None:
    bench, request = a_bench("writes_in_training", tmp_path)
    steps = count()
    for _ in range(2):
        with pytest.raises(TaskBroken, match=r"^1\.calls: training or evaluation changes them"):
            bench.train(request, lambda: next(steps) < 0)
    assert next(steps) == 2
    assert bench.evaluate(request)["statistics"]["loss"][0] > 0, "a model as it was built"


def test_a_frozen_buffer_that_an_evaluation_changes_is_refused_there(tmp_path: Path) -> None:
    bench, request = a_bench("writes_in_evaluation", tmp_path)
    for _ in range(2):
        assert bench.train(request, lambda: False)["work"] == 1.0
        with pytest.raises(TaskBroken, match=r"^1\.calls: training or evaluation changes them"):
            bench.evaluate(request)

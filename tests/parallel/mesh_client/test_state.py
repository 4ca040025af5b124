"""The state that stays at a client: over rounds in one process, on a mesh, and on a mesh that changes between them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from atoll.tensors import safetensors_file
from tests.parallel.mesh_client.clients import Arrays, Json, distance, in_one_process, on_a_mesh, write_version

LOCALS: dict[str, Json] = {
    "adamw": {"local": {"optimizer": "adamw", "lr": 0.01, "keep_optimizer": True}},
    "momentum": {"local": {"momentum": 0.9, "lr": 0.1, "keep_optimizer": True}},
    "scaffold": {"algorithm": "scaffold", "local": {"lr": 0.1}},
    "layers": {"local": {"keep": "head.*, layers.1.*"}},
    "layers, scaffold": {"algorithm": "scaffold", "local": {"lr": 0.1, "keep": "embed.*"}},
    "layers, momentum": {"local": {"momentum": 0.9, "lr": 0.1, "keep_optimizer": True, "keep": "*norm*"}},
}

SHORT = {("adamw", "4 to 2"), ("layers", "pp to ddp")}

CHANGES: dict[str, list[Json]] = {
    "4 to 2": [{"dp_shard": 4}, {"dp_shard": 2}],
    "fsdp to tp": [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}],
    "pp to ddp": [{"pp": 2, "dp_shard": 2}, {"dp_replicate": 2}],
    "tp to pp": [{"tp": 2}, {"pp": 2, "tp": 2}],
}


def second_version(folder: Path, update: Arrays) -> None:
    """Add an update to the version."""
    version = safetensors_file.read(folder / "version")
    safetensors_file.write(folder / "version", {name: array + update[name] for name, array in version.items()})


@pytest.mark.real
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param(kind, change, marks=[] if (kind, change) in SHORT else [pytest.mark.long])
        for kind in LOCALS
        for change in CHANGES
    ],
)
def test_the_state_goes_on_when_the_mesh_changes(kind: str, change: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = LOCALS[kind]
    load = {"algorithm": fields.get("algorithm", "fedavg"), "local": fields["local"]}
    write_version(tmp_path, **load)
    before, after = CHANGES[change]
    _, update = in_one_process(tmp_path, load=load, **fields)
    _, found = on_a_mesh(tmp_path, before, load=load, **fields)
    close = (
        1e-6 if kind != "adamw" else 2e-5
    )  # its first step is g / |g|, which gives the rounding of a tiny g full size
    assert distance(found, update) < close
    for which in ("one", "mesh"):
        shutil.copy(tmp_path / f"{which}.own", tmp_path / f"{which}.first")
    assert distance(*(safetensors_file.read(tmp_path / f"{which}.first") for which in ("mesh", "one"))) < close
    second_version(tmp_path, update)
    fields = {**fields, "version": 1, "round_id": 2}
    _, update = in_one_process(tmp_path, load=load, **fields, own=str(tmp_path / "one.first"))
    _, found = on_a_mesh(tmp_path, after, load=load, **fields, own=str(tmp_path / "mesh.first"))
    assert distance(found, update) < close
    assert distance(*(safetensors_file.read(tmp_path / f"{which}.own") for which in ("mesh", "one"))) < close
    _, without = in_one_process(tmp_path, load=load, **fields)
    assert distance(without, update) > 1e-2, "the state makes a difference"


@pytest.mark.real
@pytest.mark.parametrize(
    "kind", ["adamw", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("momentum", "scaffold"))]
)
def test_two_ranks_go_on_as_the_four_would_have(kind: str, tmp_path: Path) -> None:
    """From one and the same state: beyond AdamW's first step a change of the mesh is rounding."""
    fields: dict[str, Any] = LOCALS[kind]
    load = {"algorithm": fields.get("algorithm", "fedavg"), "local": fields["local"]}
    write_version(tmp_path, **load)
    _, update = on_a_mesh(tmp_path, {"dp_shard": 4}, load=load, **fields)
    shutil.copy(tmp_path / "mesh.own", tmp_path / "first")
    second_version(tmp_path, update)
    fields = {**fields, "version": 1, "round_id": 2, "own": str(tmp_path / "first")}
    (of_four, four), (of_two, two) = (on_a_mesh(tmp_path, {"dp_shard": n}, load=load, **fields) for n in (4, 2))
    assert distance(two, four) < 1e-6
    losses = [answer["statistics"]["loss"][0] for answer in (of_two, of_four)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.real
def test_a_biased_codec_leaves_its_remainder_at_the_client(tmp_path: Path) -> None:
    write_version(tmp_path)
    _, update = in_one_process(tmp_path)
    _, found = on_a_mesh(
        tmp_path, {"dp_shard": 2, "tp": 2}, codec="topk:0.100000", residual=str(tmp_path / "residual"), owed=[]
    )
    residual = safetensors_file.read(tmp_path / "residual")
    assert distance(found, update) > 0.1
    assert distance({name: array + residual.get(name, 0) for name, array in found.items()}, update) < 1e-6

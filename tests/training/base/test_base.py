"""A base's files: how they are divided, found and refused; what of them is loaded; and their digest."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from atoll import Base, Deadline, Task
from atoll.task.base import base_name
from atoll.training.base import base_files
from atoll.training.base.base_files import BaseRefused, Stored, stored_in
from atoll.training.model.frozen import frozen_digest
from atoll.training.model.parameters import build_model, initial_parameters
from atoll.training.worker.bench import Received
from atoll.training.worker.model_bench import ModelBench
from tests.training.tasks import make_task

TENSORS = {
    "0.weight": torch.arange(36.0).reshape(6, 6).bfloat16() / 36,
    "0.bias": torch.linspace(-1, 1, 6),
    "1.weight": torch.ones(6),
    "1.bias": torch.zeros(6),
}


def model() -> nn.Module:
    """Layers of which the last is trained."""
    layers = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    layers[0].requires_grad_(False)
    layers[1].requires_grad_(False)
    return layers


def task_of(base: Base | None, make: Any = model) -> Task:
    task = make_task(make)
    return Task(
        **{name: getattr(task, name) for name in ("model", "data", "sites", "loss", "local")},
        travels="trained",
        base=base,
        settings={"base": ""},
    )


def divided(folder: Path, *shards: Mapping[str, torch.Tensor], index: bool = True) -> Path:
    """Write a base as shards, as Hugging Face does."""
    folder.mkdir(exist_ok=True)
    weights: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(dict(shard), folder / name)
        weights |= dict.fromkeys(shard, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return divided(tmp_path / "whole", TENSORS, index=False)


def parts_of(names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in TENSORS.items() if name.startswith(names)}


def frozen(task: Task) -> dict[str, torch.Tensor]:
    return {name: t for name, t in build_model(task, 0).state_dict().items() if not name.startswith("2")}


# ---------------------------------------------------------------- files


def test_however_the_files_are_divided_the_values_and_the_digest_are_the_same(tmp_path: Path, whole: Path) -> None:
    shards = divided(tmp_path / "shards", parts_of("0"), parts_of("1"))
    plain = divided(tmp_path / "plain", parts_of("1"), parts_of("0"), index=False)
    one_file = next(whole.glob("*.safetensors"))
    digests = set()
    for place in (whole, one_file, shards, plain):
        task = task_of(Base(place))
        for name, tensor in frozen(task).items():
            assert torch.equal(tensor, TENSORS[name].float())
        digests.add(frozen_digest(build_model(task, 0)))
    assert len(digests) == 1


@pytest.mark.parametrize("changed", ["value", "dtype", "shape", "name"])
def test_another_base_has_another_digest(tmp_path: Path, whole: Path, changed: str) -> None:
    bias = TENSORS["0.bias"].clone()
    bias[3] = torch.nextafter(bias[3], torch.tensor(2.0))
    others: dict[str, dict[str, torch.Tensor]] = {
        "value": {"0.bias": bias},
        "dtype": {"0.weight": TENSORS["0.weight"].float()},
        "shape": {"0.weight": TENSORS["0.weight"].T.contiguous()},
        "name": {"0.bias": TENSORS["1.bias"], "1.bias": TENSORS["0.bias"]},
    }
    other = divided(tmp_path / "other", TENSORS | others[changed])
    one, two = (frozen_digest(build_model(task_of(Base(place)), 0)) for place in (whole, other))
    assert one != two


def test_boxes_are_read_by_blocks(monkeypatch: pytest.MonkeyPatch, whole: Path) -> None:
    stored, line = stored_in(whole)["0.weight"], stored_in(whole)["0.weight"].line()
    monkeypatch.setattr(base_files, "BLOCK_BYTES", 30)  # two rows of six, five of three
    box = [slice(1, 6), slice(2, 5)]
    into = torch.empty(5, 3)
    stored.read(box, into)
    assert torch.equal(into, TENSORS["0.weight"][1:6, 2:5].float())
    assert [rows for rows, _ in stored.blocks(box)] == [slice(0, 5)]
    assert len(list(stored.blocks([slice(0, 6), slice(0, 6)]))) == 3
    assert stored.line() == line


def test_a_scalar_and_an_empty_tensor_are_read_too(tmp_path: Path) -> None:
    save_file({"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}, tmp_path / "a.safetensors")
    found, into = stored_in(tmp_path), torch.empty(())
    found["scalar"].read([], into)
    assert into == 3
    found["empty"].read([slice(0, 0), slice(0, 4)], torch.empty(0, 4))
    assert len({stored.line() for stored in found.values()}) == 2


def test_faults_of_files_are_named(tmp_path: Path) -> None:
    def fault(folder: Path) -> str:
        with pytest.raises(BaseRefused) as refused:
            stored_in(folder)
        return str(refused.value)

    assert "there is no such file or folder" in fault(tmp_path / "nowhere")
    assert "it has no .safetensors file" in fault(tmp_path)
    twice = divided(tmp_path / "twice", TENSORS, parts_of("0.b"), index=False)
    assert "0.bias is in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors" in fault(twice)
    damaged = divided(tmp_path / "damaged", parts_of("0"), parts_of("1"))
    file = damaged / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    (damaged / "model-00001-of-00002.safetensors").unlink()
    found = fault(damaged)
    assert "model-00002-of-00002.safetensors cannot be read" in found
    assert "model-00001-of-00002.safetensors cannot be read" in found
    index = divided(tmp_path / "index", TENSORS) / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    entries["weight_map"]["lost"] = "model-00001-of-00001.safetensors"
    index.write_text(json.dumps(entries))
    assert "lost is not in model-00001-of-00001.safetensors, as the index says" in fault(index.parent)
    index.write_text("[]")
    assert "model.safetensors.index.json cannot be read" in fault(index.parent)


# ---------------------------------------------------------------- names


def test_peft_adds_to_names_and_the_base_has_none_of_it() -> None:
    assert base_name("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight") == (
        "model.layers.0.self_attn.q_proj.weight"
    )
    assert base_name("base_model.model.lm_head.modules_to_save.default.weight") == "lm_head.weight"
    assert base_name("base_model.model.lm_head.original_module.weight") == "lm_head.weight"
    for plain in ("model.embed_tokens.weight", "my_base_layer.weight", "lm_head.weight"):
        assert base_name(plain) == base_name(f"base_model.model.{plain}") == plain


def test_all_differences_are_named_at_once_and_no_value_is_changed(tmp_path: Path) -> None:
    wrong = {
        "0.weight": torch.ones(6, 5),
        "0.bias": torch.ones(6, dtype=torch.int64),
        "1.weight": torch.ones(6),
        "vision.a": torch.ones(1),
        "vision.b": torch.ones(1),
    }
    with pytest.raises(BaseRefused) as refused:
        build_model(task_of(Base(divided(tmp_path / "wrong", wrong))), 0)
    fault = str(refused.value)
    assert "it lacks 1.bias" in fault
    assert "0.weight is float32 (6, 5), and 0.weight of the model is float32 (6, 6)" in fault
    assert "0.bias is int64 (6,), and 0.bias of the model is float32 (6,)" in fault
    assert "the model lacks, vision.a, vision.b (name them in Base(unused=...))" in fault


def test_names_and_unused_tensors_are_the_tasks_own(tmp_path: Path) -> None:
    """A tensor without a name in the files is that of the seed, and part of the digest."""
    renamed = {f"net.{name}": tensor for name, tensor in TENSORS.items() if name != "1.bias"}
    folder = divided(tmp_path / "renamed", renamed | {"vision.a": torch.ones(1)})
    base = Base(folder, names=lambda name: None if name == "1.bias" else f"net.{name}", unused=["vision.*"])
    found = frozen(task_of(base))
    assert torch.equal(found["0.bias"], TENSORS["0.bias"])
    assert torch.equal(found["1.bias"], torch.zeros(6))


def test_a_trained_tensor_that_the_base_has_begins_with_it(tmp_path: Path) -> None:
    folder = divided(tmp_path / "all", TENSORS | {"2.weight": torch.full((3, 6), 0.5)})
    first = initial_parameters(task_of(Base(folder)), 4)
    assert set(first) == {"2.weight", "2.bias"}
    assert (first["2.weight"] == 0.5).all()
    digests = [
        frozen_digest(build_model(task_of(Base(place)), 4)) for place in (folder, divided(tmp_path / "b", TENSORS))
    ]
    assert digests[0] == digests[1]  # of what does not travel


def test_tied_tensors_take_the_value_under_any_name_and_two_values_are_refused(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        layers = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 3))
        layers[1].weight = layers[0].weight.requires_grad_(False)
        return layers

    ones = torch.ones(6, 6)
    for names in (["0.weight"], ["1.weight"], ["0.weight", "1.weight"]):
        folder = divided(tmp_path / "-".join(names), {name: ones.clone() for name in names})
        assert torch.equal(frozen(task_of(Base(folder), tied))["1.weight"], ones)
    folder = divided(tmp_path / "two", {"0.weight": ones, "1.weight": 2 * ones})
    with pytest.raises(BaseRefused, match=r"0\.weight and 1\.weight are one tensor of the model, and differ in"):
        build_model(task_of(Base(folder), tied), 0)


def test_each_site_has_its_own_place(whole: Path) -> None:
    task = task_of(Base(lambda context: context.settings["base"]))
    with pytest.raises(ValueError, match="must return a path, got ''"):
        build_model(task, 0)
    assert torch.equal(frozen(task.with_settings({"base": str(whole)}))["0.bias"], TENSORS["0.bias"])


def test_a_base_with_faults_is_refused_when_it_is_made() -> None:
    with pytest.raises(
        ValueError, match=r"folder must be.*got 7; Base: names must be.*; Base: unused must be a list.*'a'"
    ):
        Base(7, names="x", unused="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='base is for tensors that are not exchanged: set travels="trained"'):
        replace(task_of(Base("x")), travels="all")
    with pytest.raises(ValueError, match="base must be a Base or None, got 'folder'"):
        task_of("folder")  # type: ignore[arg-type]


# ---------------------------------------------------------------- digests that are kept


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    original = Stored.line

    def line(self: Stored) -> str:
        read.append(self.name)
        return original(self)

    monkeypatch.setattr(Stored, "line", line)
    return read


def test_unchanged_files_are_not_read_again_and_changed_ones_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read, cache = counted(monkeypatch), tmp_path / "bases.json"
    monkeypatch.setattr("atoll.training.base.kept_lines.SETTLED_NS", 0)
    folder = divided(tmp_path / "shards", parts_of("0"), parts_of("1"))
    task = task_of(Base(folder))
    digest = frozen_digest(build_model(task, 0), cache)
    assert sorted(read) == sorted(TENSORS)
    assert frozen_digest(build_model(task, 0), cache) == digest
    assert len(read) == 4
    save_file(parts_of("1") | {"1.bias": torch.ones(6)}, folder / "model-00002-of-00002.safetensors")
    assert frozen_digest(build_model(task, 0), cache) != digest
    assert sorted(read[4:]) == ["1.bias", "1.weight"]
    cache.write_text("[1, {")
    assert frozen_digest(build_model(task, 0), cache) != digest
    assert len(read) == 10


def test_a_file_that_has_just_changed_is_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, whole: Path
) -> None:
    read, cache = counted(monkeypatch), tmp_path / "bases.json"
    for _ in range(2):
        frozen_digest(build_model(task_of(Base(whole)), 0), cache)
    assert len(read) == 8


def test_a_place_for_the_cache_that_cannot_be_written_costs_time_alone(tmp_path: Path, whole: Path) -> None:
    assert frozen_digest(build_model(task_of(Base(whole)), 0), tmp_path / "none" / "bases.json")


# ---------------------------------------------------------------- trainings


def test_a_training_has_the_bits_of_one_whose_model_is_built_with_those_values(whole: Path) -> None:
    def with_values() -> nn.Module:
        layers = model()
        layers.load_state_dict({name: tensor.float() for name, tensor in TENSORS.items()}, strict=False)
        return layers

    updates = []
    for task in (task_of(Base(whole)), task_of(None, with_values)):
        request: dict[str, Any] = {"site": "b", "seed": 3, "model_seed": 5, "local": {}}
        bench = ModelBench(task, request)
        updates.append(bench.train(Received(bench.initial(5)), request, Deadline.never()).trained.update)
    assert updates[0].keys() == updates[1].keys() == {"2.weight", "2.bias"}
    for name, array in updates[0].items():
        assert np.array_equal(array, updates[1][name])

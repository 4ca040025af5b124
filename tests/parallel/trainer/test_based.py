"""Trainings of a model whose frozen tensors come from a base: on every mesh as in one process, and what is written."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from atoll import Base, Local, Task
from atoll.parallel.checkpoint.reading import Saved
from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.job import JobRefused
from atoll.parallel.trainer.run import Result
from atoll.parallel.trainer.saver import RunDiffers
from tests.parallel.ranks import call_on_ranks
from tests.parallel.trainer import tasks
from tests.parallel.trainer.training import mesh, model, run

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TRAINED = {"0.bias", "2.bias", "4.weight", "4.bias"}


def make_model() -> nn.Module:
    layers = tasks.make_model()
    for name, parameter in layers.named_parameters():
        parameter.requires_grad_(name in TRAINED)
    return layers


def task_of(base: Path) -> Task:
    return replace(tasks.task, model=make_model, travels="trained", base=Base(base))


def on_ranks(folder: Path, base: Path, plan: Plan, stop_after: int | None = None) -> Result:
    return run(folder, task=task_of(base), plan=plan, stop_after=stop_after)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"), 1)


def write_base(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    state = tasks.make_model().state_dict()
    folder.mkdir(exist_ok=True)
    save_file({"0.weight": state["0.weight"]}, folder / "a.safetensors")
    save_file({"2.weight": state["2.weight"]}, folder / "b.safetensors")
    return folder


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run(folder, task=task_of(base))
    return folder


def same_losses(one: Path, other: Path) -> None:
    assert tasks.losses(one) == pytest.approx(tasks.losses(other), abs=1e-5)
    assert model(one).keys() == model(other).keys()
    for name, value in model(one).items():
        torch.testing.assert_close(value, model(other)[name], rtol=0, atol=1e-5)


def test_the_training_is_that_of_a_model_with_the_bases_values_and_only_what_is_trained_is_written(
    base: Path, alone: Path, tmp_path: Path
) -> None:
    def with_values() -> nn.Module:
        layers = make_model()
        values = load_file(base / "a.safetensors") | load_file(base / "b.safetensors")
        for name, parameter in layers.named_parameters():
            if name in values and not parameter.is_meta:
                parameter.data.copy_(values[name])
        return layers

    run(tmp_path, task=replace(tasks.task, model=with_values))
    assert tasks.losses(tmp_path) == tasks.losses(alone)
    assert model(alone).keys() == TRAINED
    whole = model(tmp_path)
    assert whole.keys() == TRAINED | {"0.weight", "2.weight"}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model(alone).items())
    (*_, checkpoint) = sorted((alone / "checkpoints").glob("step-*"))
    assert {*Saved(checkpoint).names("model")} == TRAINED


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"dp_replicate": 2}, {"pp": 2}], ids=str)
def test_on_a_mesh_it_is_that_of_one_process(base: Path, alone: Path, tmp_path: Path, degrees: dict[str, int]) -> None:
    call_on_ranks(on_ranks, 2, tmp_path, base, mesh(**degrees))
    same_losses(tmp_path, alone)


def test_it_goes_on_from_one_mesh_to_another_and_not_with_another_base(base: Path, alone: Path, tmp_path: Path) -> None:
    call_on_ranks(on_ranks, 2, tmp_path, base, mesh(dp_shard=2), 4)
    with pytest.raises(RunDiffers, match="base"):
        run(tmp_path, task=task_of(write_base(tmp_path / "other", 2)))
    run(tmp_path, task=task_of(base))
    same_losses(tmp_path, alone)


def test_a_base_that_does_not_fit_is_refused_before_any_process_group(base: Path, tmp_path: Path) -> None:
    odd = write_base(tmp_path / "odd", 3)
    (odd / "b.safetensors").unlink()
    save_file({"0.more": torch.ones(1)}, odd / "c.safetensors")
    with pytest.raises(JobRefused, match=r"it lacks 2\.weight; it has, and the model lacks, 0\.more"):
        run(tmp_path / "one", task=task_of(odd))
    with pytest.raises(RankFailed, match=r"it lacks 2\.weight; it has, and the model lacks, 0\.more"):
        call_on_ranks(on_ranks, 2, tmp_path / "two", odd, mesh(dp_shard=2))


def test_a_model_with_nothing_to_train_is_refused(base: Path, tmp_path: Path) -> None:
    task = replace(task_of(base), model=lambda: make_model().requires_grad_(False))
    with pytest.raises(JobRefused, match="has no parameter to train"):
        run(tmp_path, task=task)


# ---------------------------------------------------------------- LoRA on a Llama


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=130,
            hidden_size=48,
            intermediate_size=100,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def lora_on_ranks(folder: Path, base: Path, plan: Plan) -> Result:
    import warnings

    warnings.simplefilter("ignore")
    tokens = torch.randint(130, (48, 17), generator=torch.Generator().manual_seed(3))
    task = Task(
        model=lora,
        data=lambda site, split: TensorDataset(tokens[:, :-1], tokens[:, 1:]) if split == "train" else None,
        sites=["one"],
        loss=lambda out, targets: functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten()),
        local=Local(lr=0.5),
        travels="trained",
        base=Base(base),
    )
    return run(folder, task=task, plan=plan, config=TrainConfig(batch_size=8, log_every=1, steps=6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lora_on_a_llama_on_two_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    torch.manual_seed(7)
    llama().save_pretrained(tmp_path / "base", max_shard_size="40KB")
    lora_on_ranks(tmp_path / "alone", tmp_path / "base", Plan())
    call_on_ranks(lora_on_ranks, 2, tmp_path / "two", tmp_path / "base", mesh(dp_shard=2), timeout_s=300)
    one, two = model(tmp_path / "alone"), model(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(".lora_" in name for name in one)
    first = {name: tensor for name, tensor in lora().state_dict().items() if "lora_B" in name}
    for name, tensor in one.items():
        if name in first:
            assert (tensor - first[name]).norm() > 1e-4  # it has moved
        assert (tensor - two[name]).norm() <= 1e-5 * tensor.norm()
    assert tasks.losses(tmp_path / "alone") == pytest.approx(tasks.losses(tmp_path / "two"), abs=5e-6)

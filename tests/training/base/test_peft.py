"""Adapters of the real PEFT on a Llama from its config: names, bases, files, what is frozen, what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")


from atoll import Base, Deadline, Local, Task, freeze_a
from atoll.task.errors import TaskBroken
from atoll.tensors import safetensors_file
from atoll.training.base.peft_files import Adapter, NoAdapter, write_adapter
from atoll.training.model.frozen import frozen_of
from atoll.training.model.parameters import build_model, initial_parameters, load_parameters
from atoll.training.worker.bench import Received
from atoll.training.worker.model_bench import ModelBench
from atoll.training.worker.model_files import write_initial
from tests.later import later

peft, transformers = later("peft"), later("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")]

TOKENS = torch.arange(48).reshape(4, 12) % 40


def llama(*, tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def lora(**changed: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]} | changed)


class Logits(nn.Module):
    """A model in a model, as users wrap one that returns more than logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(tokens, use_cache=False).logits
        return logits


def task_of(make: Any, base: Base | None = None) -> Task:
    return Task(
        model=make,
        data=lambda site, split: TensorDataset(TOKENS, TOKENS.roll(1)),
        loss=lambda out, targets: functional.cross_entropy(
            getattr(out, "logits", out).flatten(0, 1), targets.flatten()
        ),
        sites=["a"],
        local=Local(batch_size=2, lr=0.5, epochs=2),
        travels="trained",
        base=base,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a Llama, in shards as Hugging Face divides them."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(11)
    llama().save_pretrained(folder, max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def trained(task: Task) -> tuple[nn.Module, dict[str, Any]]:
    """Train once; return the model with the next version's tensors, and these."""
    request: dict[str, Any] = {"site": "a", "seed": 3, "model_seed": 5, "local": {}}
    bench = ModelBench(task, request)
    version = bench.initial(5)
    update = bench.train(Received(version), request, Deadline.never()).trained.update
    version = {name: array + update[name] for name, array in version.items()}
    assert any(np.any(array) for name, array in update.items() if "lora_B" in name)
    model = build_model(task, 5)
    load_parameters(model, version)
    return model.eval(), version


def exported(task: Task, version: dict[str, Any], folder: Path) -> None:
    """Write a version's adapter from the files that a coordinator has."""
    first, bench = folder / "first.safetensors", ModelBench(task, {})
    write_initial(first, bench, 5)
    file, frozen = folder / "version.safetensors", folder / "frozen.safetensors"
    safetensors_file.write(file, version, metadata=safetensors_file.read_metadata(first))
    adapter = Adapter.read(file)
    if adapter.frozen:
        bench.write_whole(frozen, None, 5, adapter.frozen)
    write_adapter(file, adapter, folder, frozen if adapter.frozen else None)


CASES = {
    "lora": lambda: peft.get_peft_model(llama(), lora()),
    "biases": lambda: peft.get_peft_model(llama(), lora(bias="lora_only")),
    "a whole head": lambda: peft.get_peft_model(llama(), lora(modules_to_save=["lm_head"])),
    "embeddings": lambda: peft.get_peft_model(llama(), lora(target_modules=["embed_tokens", "q_proj"])),
    "another name": lambda: peft.get_peft_model(llama(), lora(), adapter_name="site"),
    "frozen A": lambda: freeze_a(peft.get_peft_model(llama(), lora())),
    "in a model": lambda: Logits(peft.get_peft_model(llama(), lora())),
}


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_the_files_of_a_version_and_computes_the_same(case: str, base: Path, tmp_path: Path) -> None:
    names = None
    if case == "in a model":
        names = Base("x").names
    task = task_of(
        CASES[case],
        Base(base) if names is None else Base(base, names=lambda name: names(name.removeprefix("inner."))),
    )
    model, version = trained(task)
    exported(task, version, tmp_path)
    plain = transformers.LlamaForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path, adapter_name="default").eval()
    with torch.no_grad():
        ours, theirs = model(TOKENS), loaded(TOKENS).logits
        ours = getattr(ours, "logits", ours)
    assert torch.equal(ours, theirs)
    untouched = transformers.LlamaForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        assert not torch.equal(untouched(TOKENS).logits, ours)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["inference_mode"]) == ("LORA", 2, True)


def test_an_adapter_that_is_made_from_the_bases_weights_is_refused_with_a_base_and_right_without(
    base: Path, tmp_path: Path
) -> None:
    """A `Base` is read into a model that is built: DoRA would begin with the norms of random weights."""
    for changed in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(
            TaskBroken, match=f"{next(iter(changed))}=.*begins with values made from the base's weights"
        ):
            build_model(task_of(lambda made=changed: peft.get_peft_model(llama(), lora(**made)), Base(base)), 0)

    def with_weights() -> nn.Module:
        return peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), lora(use_dora=True))

    task = task_of(with_weights)
    model, version = trained(task)
    exported(task, version, tmp_path)
    loaded = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(base), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, loaded(TOKENS).logits)


def test_only_the_factors_travel_and_the_note_does_not_change() -> None:
    task = task_of(CASES["lora"])
    first = initial_parameters(task, 5)
    assert set(first) == {
        f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.default.weight"
        for layer in range(2)
        for module in ("self_attn.q_proj", "mlp.down_proj")
        for factor in "AB"
    }
    half = initial_parameters(task_of(CASES["frozen A"]), 5)
    assert set(half) == {name for name in first if "lora_B" in name}
    assert ModelBench(task, {}).adapter(5) == ModelBench(task, {}).adapter(6)
    assert ModelBench(task_of(plain_head), {}).adapter(5) == ""


def test_pefts_own_files_have_the_same_tensors(base: Path, tmp_path: Path) -> None:
    task = task_of(CASES["lora"], Base(base))
    model, version = trained(task)
    exported(task, version, tmp_path)
    expected = peft.get_peft_model_state_dict(model)
    found = safetensors_file.read(tmp_path / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], tensor.numpy()) for name, tensor in expected.items())


def test_frozen_factors_are_drawn_by_the_seed_of_the_run() -> None:
    one, two, other = (build_model(task_of(CASES["frozen A"]), seed).state_dict() for seed in (5, 5, 6))
    factors = [name for name in one if "lora_A" in name]
    assert factors
    for name in factors:
        assert torch.equal(one[name], two[name])
        assert not torch.equal(one[name], other[name])


def test_the_mean_of_products_with_a_frozen_a_is_the_product_of_the_mean() -> None:
    """With both factors trained it is not: 1/2 (B1 A1 + B2 A2) - (B1 + B2)/2 (A1 + A2)/2 = 1/4 (B1 - B2) (A1 - A2)."""
    a, b = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    apart = b.mean(0) @ a.mean(0)
    torch.testing.assert_close((b @ a).mean(0) - apart, (b[0] - b[1]) @ (a[0] - a[1]) / 4)
    torch.testing.assert_close((b @ a[0]).mean(0), b.mean(0) @ a[0])


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_over_a_tied_tensor_is_refused_by_name() -> None:
    def over_the_head(**more: Any) -> Task:
        return task_of(
            lambda: peft.get_peft_model(llama(tied=True), lora(target_modules=["q_proj", "lm_head"], **more))
        )

    with pytest.raises(TaskBroken, match=r"lm_head: an adapter over a tied tensor \(.*embed_tokens.*lm_head.*\)"):
        initial_parameters(over_the_head(), 0)
    assert initial_parameters(task_of(lambda: peft.get_peft_model(llama(tied=True), lora())), 0)


def test_what_peft_has_no_place_for_is_refused_by_name(tmp_path: Path) -> None:
    def with_norm() -> nn.Module:
        model = peft.get_peft_model(llama(), lora())
        model.base_model.model.model.norm.weight.requires_grad_(True)
        return model

    for make, sentence in ((with_norm, r"norm\.weight: trained, and no part of the adapter"), (plain_head, "no PEFT")):
        write_initial(tmp_path / "version", ModelBench(task_of(make), {}), 0)
        with pytest.raises(NoAdapter, match=sentence):
            Adapter.read(tmp_path / "version")


def plain_head() -> nn.Module:
    model = llama().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


def test_a_tied_base_is_found_under_either_name(tmp_path: Path) -> None:
    torch.manual_seed(2)
    whole = llama(tied=True)
    whole.save_pretrained(tmp_path)
    task = task_of(lambda: peft.get_peft_model(llama(tied=True), lora()), Base(tmp_path))
    model = build_model(task, 9)
    assert torch.equal(model.state_dict()["base_model.model.lm_head.weight"], whole.state_dict()["lm_head.weight"])
    assert "base_model.model.model.embed_tokens.weight" in frozen_of(model)

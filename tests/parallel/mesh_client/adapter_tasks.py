"""Tasks of which a part alone travels, with a base that the site's setting names, or one that is drawn."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from atoll import Base, Local
from atoll.training.base.peft_models import freeze_a
from tests.parallel.mesh_client.tasks import LENGTH, VOCAB, decoder, loss, task

os.environ.setdefault("HF_HUB_OFFLINE", "1")

IN_BASE = Base(lambda context: context.settings["base"])
TRAINED = ("norm.weight", "query.weight", "out.weight", "head.weight")


def in_part() -> nn.Module:
    """The decoder of the other tests, of which some weights are trained."""
    model = decoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(TRAINED))
    return model


def write_decoder(folder: Path, seed: int = 5, leaves_out: tuple[str, ...] = TRAINED) -> Path:
    """Write the frozen tensors of the decoder, in two files, and two of them in bfloat16."""
    torch.manual_seed(seed)
    state = {name: value for name, value in decoder().state_dict().items() if not name.endswith(leaves_out)}
    names = sorted(state)
    folder.mkdir()
    save_file({name: state[name] for name in names[::2]}, folder / "a.safetensors")
    save_file({name: state[name].bfloat16() for name in names[1::2]}, folder / "b.safetensors")
    return folder


def write_with_trained(folder: Path) -> Path:
    """Write the tensors of the decoder, also the trained ones without the last layer's."""
    return write_decoder(folder, leaves_out=("head.weight",))


def llama(layers: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def write_llama(folder: Path, seed: int = 5) -> Path:
    """Write a Llama as Hugging Face does, in shards with an index."""
    torch.manual_seed(seed)
    llama().save_pretrained(folder, max_shard_size="8KB")
    return folder


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "initializer_range": 0.2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes, **no_dropout))


def write_gpt2(folder: Path, seed: int = 5) -> Path:
    torch.manual_seed(seed)
    gpt2().save_pretrained(folder, max_shard_size="8KB")
    return folder


def lora(model: Any = None, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"} | options
    wrapped = get_peft_model(llama() if model is None else model, LoraConfig(**settings))
    torch.manual_seed(11)
    for name, parameter in wrapped.named_parameters():
        if ".lora_B." in name and not parameter.is_meta:
            nn.init.normal_(parameter, std=0.1)  # not zeros, where A would have no gradient in the first step
    return wrapped


def of_logits(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return loss(outputs.logits, targets)


class WritesOnce(nn.Module):
    """A buffer of no trained module, which the first pass of one kind changes, and no other."""

    def __init__(self, in_training: bool) -> None:
        super().__init__()
        self.in_training = in_training
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training == self.in_training and self.calls == 0:
            self.calls += 1
        return x


def with_calls(in_training: bool) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, 16), WritesOnce(in_training), nn.Linear(16, VOCAB))


settings = {"base": "/nowhere"}
part_of_decoder = replace(task, model=in_part, travels="trained", base=IN_BASE, settings=settings)
drawn = replace(task, model=in_part, travels="trained")
writes_in_training = replace(task, model=lambda: with_calls(True), travels="trained")
writes_in_evaluation = replace(writes_in_training, model=lambda: with_calls(False))
lora_on_llama = replace(
    part_of_decoder, model=lora, loss=of_logits, metrics={}, local=Local(epochs=1, batch_size=8, lr=0.5)
)
kept_in_base = replace(part_of_decoder, local=replace(task.local, epochs=1, keep="layers.1.*, head.*"))
lora_on_gpt2 = replace(lora_on_llama, model=lambda: lora(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True))
whole_gpt2 = replace(task, model=gpt2, loss=of_logits, metrics={}, local=lora_on_llama.local)
lora_without_a = replace(lora_on_llama, model=lambda: freeze_a(lora()))
tasks = {
    "part_of_decoder": write_decoder,
    "drawn": None,
    "kept_in_base": write_with_trained,
    "lora_on_llama": write_llama,
    "lora_without_a": write_llama,
    "lora_on_gpt2": write_gpt2,
    "whole_gpt2": None,
}
"""The writer of the base by the name of the task; None: it has none."""

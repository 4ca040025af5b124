"""LoRA adapters on a tiny Llama: five sites with sources of other packages, and only the adapters travel.

python examples/adapters/make_base.py /tmp/tiny-llama
atoll simulate examples/adapters/task.py:task --rounds 5
"""

import os
from typing import Any

import torch
from llama import PACKAGES, PUBLIC, config, sources, windows
from torch import nn
from torch.nn import functional

from atoll import Base, Local, Task


def make_model() -> nn.Module:
    """Return the Llama from its config with LoRA of rank 4; the base's files have its weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    return get_peft_model(LlamaForCausalLM(config()), lora)


def load_site(site: str, split: str) -> Any:
    """Return the windows of one split of a site's package; a site that owns none has the public one."""
    return windows(sources(PACKAGES.get(site, PUBLIC), is_test=split == "test"))


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next byte."""
    return functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def accuracy(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the number of correct next bytes, and of all."""
    return (outputs.logits.argmax(dim=-1) == targets).sum(), targets.numel()


task = Task(
    model=make_model,
    travels="trained",
    base=Base(lambda context: context.settings["base"]),
    settings={"base": os.environ.get("TINY_LLAMA", "/tmp/tiny-llama")},
    data=load_site,
    sites=[*PACKAGES],
    loss=loss,
    metrics={"accuracy": accuracy},
    local=Local(batch_size=16, optimizer="adamw", lr=3e-3, max_steps=20),
    test_data=lambda: windows(sources(PUBLIC, is_test=False)),
)

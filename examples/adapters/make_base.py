"""Make the base: train the tiny Llama on Python's help pages, and save it as Hugging Face does, in shards.

python examples/adapters/make_base.py /tmp/tiny-llama
"""

import sys

import torch
from llama import config, help_pages, windows
from torch.nn import functional

STEPS, BATCH = 200, 16


def main(folder: str, steps: int = STEPS) -> None:
    """Train for some steps from a fixed seed, and save the model in shards of 200 kB."""
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)  # the model is too small for more
    torch.manual_seed(0)
    model, (inputs, targets) = LlamaForCausalLM(config()), windows(help_pages()).tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        rows = torch.randint(len(inputs), (BATCH,))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs[rows]).logits.flatten(0, 1), targets[rows].flatten())
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder, max_shard_size="200KB")
    print(f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters, loss {loss.item():.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))

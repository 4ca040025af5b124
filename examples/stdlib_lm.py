"""A small language model of bytes, trained on the sources of Python's standard library (`stdlib_text`).

    atoll train examples/stdlib_lm.py:task
    atoll train examples/stdlib_lm.py:task --nproc 2 --mesh tp=2

The loss begins at ln 264 = 5.6, that of a uniform guess, and is below 2 after the default of one epoch: loss / ln 2 is
then less than three bits a byte.
"""

import stdlib_text
import torch
from torch.nn import functional

from atoll import Local, Task
from atoll.parallel.models.decoder import Decoder, DecoderConfig

IGNORED = -100
"""The target of positions without a loss: the first byte of each file."""

CONFIG = DecoderConfig(vocab=264, dim=128, layers=3, heads=4, sequence=stdlib_text.SEQUENCE)
"""The decoder's sizes; the 257 tokens are rounded up to a multiple of 8, so that tp=8 can shard them."""


def make_model() -> Decoder:
    """Return a decoder of 0.7 million parameters."""
    return Decoder(CONFIG)


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over the tokens with a target: (B, S, V), (B, S) -> ()."""
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=IGNORED)


def accuracy(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of correct next bytes and of all with a target."""
    counts = tokens != IGNORED
    return ((logits.argmax(dim=-1) == tokens) & counts).sum(), counts.sum()


task = Task(
    model=make_model,
    data=stdlib_text.load_site,
    sites=stdlib_text.SITES,
    loss=loss,
    metrics={"accuracy": accuracy},
    local=Local(batch_size=32, optimizer="adamw", lr=3e-3, weight_decay=0.01, clip_norm=1.0),
    test_data=stdlib_text.load_test,
)

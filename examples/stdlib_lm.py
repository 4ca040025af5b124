"""A small language model of bytes, on the sources of Python's own standard library (`stdlib_text`).

    atoll train examples/stdlib_lm.py:task
    atoll train examples/stdlib_lm.py:task --nproc 2 --mesh tp=2

The loss begins at ln 264 = 5.6, what a model knows that knows nothing, and is below 2 after the one epoch of the
default; in bits, loss / ln 2, a byte then costs less than three of its eight.
"""

import stdlib_text
import torch
from torch.nn import functional

from atoll import Local, Task
from atoll.parallel.models.decoder import Decoder, DecoderConfig

IGNORED = -100
"""Targets that do not count: the first byte of a file."""

CONFIG = DecoderConfig(vocab=264, dim=128, layers=3, heads=4, sequence=stdlib_text.SEQUENCE)
"""257 tokens, rounded up to a multiple of 8, so that tp=8 can cut them."""


def make_model() -> Decoder:
    """0.7 million parameters."""
    return Decoder(CONFIG)


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the tokens that count: (B, S, V), (B, S) -> ()."""
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=IGNORED)


def accuracy(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the next bytes are right, of how many."""
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

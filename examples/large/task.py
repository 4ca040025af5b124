"""A language model of bytes at three sites, one of which trains it on a mesh of four ranks (`make demo-large`).

The text is that of `stdlib_text`, the sources of Python's standard library, divided between the sites by files.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples beside this folder

import stdlib_text
import torch
from torch.nn import functional

from atoll import Local, Task
from atoll.parallel.models.decoder import Decoder, DecoderConfig

SITES = ["north", "south", "cluster"]
TEST_FILES = 1
CONFIG = DecoderConfig(vocab=264, dim=384, layers=8, heads=6, sequence=stdlib_text.SEQUENCE)


def make_model() -> Decoder:
    """Return a decoder of 14 million parameters, 57 MB."""
    return Decoder(CONFIG)


def data(site: str, split: str) -> object:
    """Return the windows of a site's files: every third of the training files."""
    if split != "train":
        return None
    of_sites = [path for place, path in enumerate(stdlib_text.files()) if place % 10]
    return stdlib_text.windows(of_sites[SITES.index(site) :: len(SITES)])


def test_data() -> object:
    """Return the windows of the server's first file."""
    return stdlib_text.windows([*stdlib_text.files()[:TEST_FILES]])


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over the tokens with a target: (B, S, V), (B, S) -> ()."""
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


task = Task(
    model=make_model,
    data=data,
    sites=SITES,
    loss=loss,
    test_data=test_data,
    local=Local(batch_size=8, max_steps=4, optimizer="adamw", lr=1e-3, clip_norm=1.0),
)

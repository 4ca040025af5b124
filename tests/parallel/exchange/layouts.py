"""The layouts of a mesh under which shares, loading and writing are tested: a model, degrees, options of the plan."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from atoll.parallel.models.decoder import Decoder, DecoderConfig
from tests.parallel.models.cnn import CNN


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab=66, dim=24, layers=4, heads=4, ffn=50, sequence=8))


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab=66, dim=24, layers=4, heads=4, ffn=50, sequence=8, tied=True))


def norms() -> nn.Module:
    torch.manual_seed(0)
    return CNN([1, 4, 8], 8, hidden=16)


Layout = tuple[Callable[[], nn.Module], dict[str, int], dict[str, Any]]

LAYOUTS: dict[str, Layout] = {
    "one rank": (plain, {}, {}),
    "shards": (plain, {"dp_shard": 4}, {}),
    "shards, zero 2": (plain, {"dp_shard": 2}, {"zero": 2}),
    "copies": (plain, {"dp_replicate": 4}, {}),
    "copies of shards": (plain, {"dp_replicate": 2, "dp_shard": 2}, {}),
    "tensor": (plain, {"tp": 2}, {}),
    "uneven shards of tensor": (plain, {"dp_shard": 3, "tp": 2}, {}),
    "copies of shards of tensor": (plain, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {}),
    "sequence": (plain, {"dp_shard": 2, "tp": 2}, {"sequence_parallel": True}),
    "stages": (plain, {"pp": 2}, {}),
    "interleaved stages": (plain, {"pp": 2}, {"schedule": "interleaved-1f1b"}),
    "stages of shards": (plain, {"pp": 2, "dp_shard": 2}, {}),
    "stages of tensor": (plain, {"pp": 2, "tp": 2}, {}),
    "stages of shards of tensor": (plain, {"pp": 2, "dp_shard": 2, "tp": 2}, {}),
    "tied, stages of shards": (tied, {"pp": 2, "dp_shard": 2}, {}),
    "tied, shards of tensor": (tied, {"dp_shard": 2, "tp": 2}, {}),
    "tied, stages of tensor": (tied, {"pp": 2, "tp": 2}, {}),
    "norms, shards": (norms, {"dp_shard": 3}, {}),
    "norms, copies": (norms, {"dp_replicate": 2}, {}),
    "bf16": (plain, {"dp_shard": 2, "tp": 2}, {"precision": "bf16"}),
    "diloco": (plain, {"dp_replicate": 2}, {"outer": "diloco:2"}),
}

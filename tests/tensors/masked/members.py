"""Members of a small secure sum: layouts, updates, plans and streams, and the sum by Python's integers."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.tensors import safetensors_file
from atoll.tensors.layout import Layout, Tensor
from atoll.tensors.secure.keystream import Stream
from atoll.tensors.secure.masked_layout import MetricShape
from atoll.tensors.secure.plan import EncodingPlan

METRICS = (MetricShape("accuracy", 2), MetricShape("loss", 2))
LAYOUT = (
    Tensor("steps", "I64", ()),
    Tensor("b", "F32", (5,)),
    Tensor("a.w", "F32", (7, 11)),
    Tensor("empty", "F32", (0, 3)),
    Tensor("scale", "F32", ()),
    Tensor("small", "U8", (3,)),
)
DTYPES = {"F32": np.float32, "I64": np.int64, "U8": np.int16}
"""The dtype of an update of a tensor; a difference of bytes needs 16 bits."""


def update_of(layout: Layout, seed: int, size: float = 0.1) -> dict[str, NDArray[Any]]:
    """Return a random update."""
    draw = np.random.default_rng(seed)
    return {
        t.name: (
            draw.normal(0, size, t.shape).astype(np.float32)
            if t.dtype == "F32"
            else draw.integers(-100, 100, t.shape).astype(DTYPES[t.dtype])
        )
        for t in layout
    }


def stored(path: Path, arrays: Mapping[str, Any]) -> Path:
    """Write an update as a worker does."""
    safetensors_file.write(path, {name: np.asarray(array) for name, array in arrays.items()}, durable=False)
    return path


def plan_of(layout: Layout, bits: int = 32, **options: Any) -> EncodingPlan:
    """Return the plan of a member."""
    floats = sum(tensor.dtype == "F32" for tensor in layout)
    settings = {
        "clip_norm": 1.0,
        "exponents": (0,) * floats,
        "examples_max": 100,
        "num_examples": 40,
        "metrics": METRICS,
        "statistics": {"loss": (1.5, 40.0), "accuracy": (31.0, 40.0)},
    }
    return EncodingPlan(bits=bits, **{**settings, **options})


def pairwise(members: int) -> tuple[list[list[Stream]], list[Stream]]:
    """Return the streams of each member, which cancel but for one of its own, and those to take off the sum."""
    streams: list[list[Stream]] = [[] for _ in range(members)]
    for i in range(members):
        for j in range(i + 1, members):
            key = os.urandom(32)
            streams[i].append((key, 1))
            streams[j].append((key, -1))
    own = [os.urandom(32) for _ in range(members)]
    for each, key in zip(streams, own, strict=True):
        each.append((key, 1))
    return streams, [(key, -1) for key in own]


def summed(files: Sequence[Mapping[str, NDArray[Any]]], bits: int) -> dict[str, list[int]]:
    """Return the sum of words modulo 2^bits, or 2^64 of `secure/exact`, by Python's integers."""
    found = {}
    for name in files[0]:
        modulus = 1 << (64 if name == "secure/exact" else bits)
        rows = [[int(word) % modulus for word in file[name].reshape(-1)] for file in files]
        found[name] = [sum(column) % modulus for column in zip(*rows, strict=True)]
    return found


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Draw a shape, and the boxes of the ranks of a mesh: rows of FSDP, columns of TP, uneven, in any grid."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    parts = []
    for size in shape:
        num = draw(st.integers(1, 4))
        step = -(-size // num)  # as FSDP divides: uneven, and ranks may have nothing
        parts.append([(at, min(step, size - at)) for at in range(0, size, step)])
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for axis in parts:
        boxes = [((*o, at), (*n, length)) for o, n in boxes for at, length in axis]
    return shape, boxes

"""The concatenation of several clients' examples in one tensor."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from atoll.simulations.engines.examples import Examples


def of_one_kind(examples: Sequence[Examples]) -> list[int]:
    """Return the indices of clients whose examples fit into one tensor: like the first client that has tensors."""
    first = next((each.kind for each in examples if each.kind), None)
    return [index for index, each in enumerate(examples) if first is not None and each.kind == first]


def concatenated(examples: Sequence[Examples]) -> tuple[list[Examples], tuple[torch.Tensor, ...], list[int]]:
    """Concatenate the clients' examples, without a copy if they are parts of the same tensors.

    Returns:
        The clients' examples, the tensors that contain all of them, and the offset of each client's examples therein.
    """
    first = examples[0].tensors or ()
    if all(each.tensors is first or _are_same(first, each.tensors or ()) for each in examples):
        return list(examples), first, [0] * len(examples)
    compact = [each if each.chosen is None else taken_out(each) for each in examples]
    tensors = tuple(torch.cat(column) for column in zip(*(each.tensors or () for each in compact), strict=True))
    ends = np.cumsum([each.count for each in compact]).tolist()
    return compact, tensors, [0, *ends[:-1]]


def _are_same(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(a is b for a, b in zip(tensors, others, strict=True))


def taken_out(examples: Examples) -> Examples:
    """Copy these examples into tensors without any others."""
    return replace(examples, tensors=tuple(t[examples.chosen] for t in examples.tensors or ()), chosen=None)

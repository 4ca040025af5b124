"""The examples of several clients beside each other in one tensor."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from atoll.simulations.engines.examples import Examples


def of_one_kind(found: Sequence[Examples]) -> list[int]:
    """Which clients' examples can lie in one tensor: those like the first that has tensors."""
    first = next((examples.kind for examples in found if examples.kind), None)
    return [index for index, examples in enumerate(found) if first is not None and examples.kind == first]


def beside(found: Sequence[Examples]) -> tuple[list[Examples], tuple[torch.Tensor, ...], list[int]]:
    """The clients' examples in one tensor for all, and where in it each client's begin."""
    first = found[0].tensors or ()
    if all(examples.tensors is first or _are_same(first, examples.tensors or ()) for examples in found):
        return list(found), first, [0] * len(found)
    taken = [e if e.chosen is None else taken_out(e) for e in found]
    tensors = tuple(torch.cat(column) for column in zip(*(e.tensors or () for e in taken), strict=True))
    ends = np.cumsum([examples.count for examples in taken]).tolist()
    return taken, tensors, [0, *ends[:-1]]


def _are_same(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(a is b for a, b in zip(tensors, others, strict=True))


def taken_out(examples: Examples) -> Examples:
    """The same examples, in tensors that hold no others."""
    return replace(examples, tensors=tuple(t[examples.chosen] for t in examples.tensors or ()), chosen=None)

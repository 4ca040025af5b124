"""Tensors of a model that share memory: one tensor under several names (tied weights), and views of one storage."""

from collections.abc import Mapping

import numpy as np
import torch

WORK_MAX = 100_000
"""Largest number of candidates for a common byte of two strided views; beyond it they count as overlapping."""

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def groups_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return for each name the first name of its group: two tensors with a common byte are in one group.

    Groups are transitive: a view of a view belongs to the whole. Neighbours in one flat storage share no byte, so each
    is a separate group.
    """
    first = {name: name for name in tensors}

    def root(name: str) -> str:
        while first[name] != name:
            name = first[name]
        return name

    order = list(tensors)
    spans = sorted((*_span(tensor), place) for place, tensor in enumerate(tensors.values()) if tensor.numel())
    open_: list[tuple[str, int, int]] = []
    for device, begin, end, place in spans:
        open_ = [each for each in open_ if each[0] == device and each[1] > begin]
        name = order[place]
        for _, _, other in open_:
            a, b = root(name), root(order[other])
            if a != b and _overlap(tensors[name], tensors[order[other]]):
                low, high = sorted((a, b), key=order.index)
                first[high] = low
        open_.append((device, end, place))
    return {name: root(name) for name in order}


def _span(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Return the memory, and the first byte and the one after the last byte that a tensor uses."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    place, begin = str(tensor.device), tensor.data_ptr()
    if tensor.is_meta:  # without an address: the identity of its storage
        place = f"meta {tensor.untyped_storage()._cdata}"
        begin = int(tensor.storage_offset()) * tensor.element_size()
    return place, begin, begin + (reach + 1) * tensor.element_size()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping spans have a common byte; True if that is too hard to decide."""
    if a.device.type != "cpu" or not {a.element_size(), b.element_size()} <= _SAME_SIZE.keys():
        return True
    one, other = (tensor.detach().view(_SAME_SIZE[tensor.element_size()]).numpy() for tensor in (a, b))
    try:
        return bool(np.shares_memory(one, other, WORK_MAX))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True

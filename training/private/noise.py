r"""The noise of a step on the whole gradient: a Gaussian of each element's position, from the step's secret key.

    sum + N(0, (z C)^2), rounded to the grid of 2^(floor(log2(z C)) - 30)

The key of a block of elements is HMAC(key of the training, step, tensor, block), and its noise is drawn from an
AES-256-CTR stream (`ground/noise`), so it depends on the position alone: not on micro-batches, threads or ranks, each
of which would add noise of its own. The sum is in float64, and so is the noise, whose gaps are below 2^-50 of z C; both
are rounded to the grid, 2^20 times wider, before anything sees the values: their last bits tell nothing of the summands
(Mironov, CCS 2012). The grid follows from z C, never from data.

By Box and Muller (1958), sqrt(-2 ln u) cos(2 pi v), where u has 106 bits: the tail beyond 8.6 standard deviations,
which 53 bits cut, has its full length.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atoll.ground.noise.generator import words_of
from atoll.ground.noise.key import key_of

Normals = np.ndarray[Any, np.dtype[np.float64]]

BLOCK = 1 << 16
"""Number of elements with one key."""

GRID_BITS = 30


def grid_of(std: float) -> float:
    """Return the grid of a noise's standard deviation, a power of two."""
    return 2.0 ** (math.floor(math.log2(std)) - GRID_BITS)


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    slices: tuple[slice, ...]
    """The part as an index of the tensor, one slice with a begin and an end for each dimension."""

    @property
    def range(self) -> tuple[int, int] | None:
        """The positions [begin, end) in the flat tensor; None: the part is no range."""
        if not self.shape:
            return 0, 1
        if any(
            (each.start, each.stop) != (0, size) for each, size in zip(self.slices[1:], self.shape[1:], strict=True)
        ):
            return None
        of_row = math.prod(self.shape[1:])
        return self.slices[0].start * of_row, self.slices[0].stop * of_row


def add_noise(
    sums: Mapping[str, torch.Tensor], key: bytes, step: int, std: float, boxes: Mapping[str, Box] | None = None
) -> None:
    """Add the noise of a step to float64 tensors in place, and round them to the grid.

    Args:
        sums: the sums by their parameters' names.
        key: 32 bytes, secret; of one training and one time that its steps are done.
        step: the number of the step.
        std: z C, above 0.
        boxes: the parts of the tensors that the sums are; None, or without a name: whole tensors.
    """
    grid, of_step = grid_of(std), key_of(key, "noise", step)
    for name, tensor in sums.items():
        if not tensor.numel():
            continue
        box = (boxes or {}).get(name)
        drawn = normals(of_step, name, tensor.numel()) if box is None else normals_in(of_step, name, box)
        _add(tensor, drawn, std, grid)


def add_noise_of_each(sums: Mapping[str, torch.Tensor], keys: Sequence[bytes], step: int, std: float) -> None:
    """Add the noise of a step of several trainings, each with the bits of `add_noise` with its key.

    Args:
        sums: (k, *shape) float64 by the parameters' names.
        keys: k keys of 32 bytes, secret; one of each training.
        step: the number of the step.
        std: z C, above 0.
    """
    grid, of_step = grid_of(std), [key_of(key, "noise", step) for key in keys]
    for name, tensor in sums.items():
        if tensor.numel():
            drawn = np.concatenate([normals(key, name, tensor[0].numel()) for key in of_step])
            _add(tensor, drawn, std, grid)


def _add(tensor: torch.Tensor, drawn: Normals, std: float, grid: float) -> None:
    """Add standard normal numbers times a standard deviation in place, and round to the grid."""
    noise = torch.from_numpy(drawn).mul_(std).view(tensor.shape)
    tensor.add_(noise.to(tensor.device)).div_(grid).round_().mul_(grid)


def normals(key: bytes, name: str, count: int) -> Normals:
    """Return the standard normal numbers of a tensor's elements, by position."""
    return _in_range(key, name, count, 0, count)


def normals_in(key: bytes, name: str, box: Box) -> Normals:
    """Return the standard normal numbers of a part of a tensor, the same as in the whole one; flat."""
    count = math.prod(box.shape)
    if (found := box.range) is not None:
        return _in_range(key, name, count, *found)
    return np.ascontiguousarray(normals(key, name, count).reshape(box.shape)[box.slices]).reshape(-1)


def _in_range(key: bytes, name: str, count: int, begin: int, end: int) -> Normals:
    """Return the numbers of the positions [begin, end) of a tensor of `count` elements."""
    found = np.empty(end - begin, np.float64)
    for block in range(begin // BLOCK, -(-end // BLOCK)):
        first = block * BLOCK
        of_block = _of_block(key_of(key, name, block), min(BLOCK, count - first))
        low, high = max(begin, first), min(end, first + len(of_block))
        found[low - begin : high - begin] = of_block[low - first : high - first]
    return found


def _of_block(key: bytes, count: int) -> Normals:
    pairs = -(-count // 2)
    words = words_of(key, 3 * pairs)
    high, low, turn = words[:pairs] >> 11, words[pairs : 2 * pairs] >> 11, words[2 * pairs :] >> 11
    u = high * 2.0**-53 + (low + 1) * 2.0**-106  # in (0, 1]
    radius, angle = np.sqrt(-2.0 * np.log(u)), turn * (2.0 * np.pi * 2.0**-53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

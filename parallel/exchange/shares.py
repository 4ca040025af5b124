"""The shares of a model on the ranks of a mesh: the boxes that a rank holds, and the ones that it owns.

A *box* is an N-d part of one tensor of the whole model, under the name by which it is sent. With data-parallel copies,
norms under tensor parallelism or tied weights on two stages of a pipeline, several ranks hold the same box. Each box is
owned by exactly one of them, without communication:

    copy c of C owns the boxes of tensor i  if  i mod C = c

i is the index of the tensor in the layout of the whole model, which all ranks know. (A count of the rank's tensors
would fail: with uneven shards a rank holds nothing of a small tensor, and the counts of two copies differ.) So
copies take turns, and all send equally much.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from atoll.ground.faults import Refused
from atoll.parallel.checkpoint.export import DTYPES
from atoll.parallel.checkpoint.state import first_names, local_state
from atoll.parallel.engine.axes import Axes
from atoll.tensors.layout import Piece


@dataclass(frozen=True, slots=True)
class Share:
    """One box of a tensor that this rank holds."""

    name: str
    """The tensor's name in the whole model; of a tied weight the first."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    local: torch.Tensor
    """The values (*lengths), which training changes."""
    num_copies: int
    """The number of ranks that hold the same box, C."""
    copy: int
    """The index of this rank among the C ranks with the box, c."""
    is_further: bool = False
    """A further copy of a tied weight, whose first place is another parameter, here or on another stage."""

    @property
    def piece(self) -> Piece:
        """The box as a piece of a file, without a digest; floats are sent as float32."""
        return Piece(self.name, DTYPES[self.local.dtype], self.offsets, self.lengths, "")

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the whole tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offsets, self.lengths, strict=True))


def shares_of(parts: Sequence[nn.Module], axes: Axes | None, tied: Sequence[Sequence[str]] = ()) -> list[Share]:
    """Return the boxes that this rank holds, of parameters and exchanged buffers; empty ones are left out.

    Args:
        parts: the parts of this rank, wrapped or not.
        axes: the axes of the mesh; None: this rank is alone.
        tied: the names of each tied weight of the whole model (`engine.ties.tied_names`).

    Raises:
        ValueError: a tensor cannot be sent, or is not one box here; the message lists every reason.
    """
    local = local_state(parts, (), first_names(tied))
    own_names, firsts = {name for name, _ in local.parameters}, set(local.tied.values())
    seen: set[str] = set()
    shares: list[Share] = []
    faults = list(local.faults)
    for name, tensor in local.tensors:
        if tensor.dtype not in DTYPES:
            faults.append(f"{name} is {tensor.dtype}, which cannot be exchanged")
            continue
        is_further = name in seen or (name in firsts and name not in own_names)
        seen.add(name)
        if (share := share_of(name, tensor, axes, is_further)) is not None:
            shares.append(share)
    if faults:
        raise Refused(*faults)
    return shares


def owned(shares: Iterable[Share], names: Iterable[str]) -> list[Share]:
    """Return the boxes that this rank owns, sorted by name: over all ranks of a mesh each box of each tensor once.

    Args:
        shares: the shares of this rank.
        names: the names of all tensors of the whole model.
    """
    index = {name: number for number, name in enumerate(sorted(names))}
    mine = [share for share in shares if not share.is_further and index[share.name] % share.num_copies == share.copy]
    return sorted(mine, key=lambda share: share.name)


def share_of(name: str, tensor: torch.Tensor, axes: Axes | None, is_further: bool = False) -> Share | None:
    """Return the box of a tensor; None if this rank has nothing of it."""
    num_copies, copy = _place(tensor, axes)
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Share(name, shape, (0,) * len(shape), shape, tensor.detach(), num_copies, copy, is_further)
    local, boxes = tensor.to_local().detach(), tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    boxes = [box for box in boxes if prod(box.sizes)]
    if not boxes:
        return None
    (box,) = boxes
    return Share(name, tuple(tensor.shape), tuple(box.offsets), tuple(box.sizes), local, num_copies, copy, is_further)


def _place(tensor: torch.Tensor, axes: Axes | None) -> tuple[int, int]:
    """Return the number of ranks that hold the same box of a stage's tensor, and the index of this rank."""
    if axes is None:
        return 1, 0
    sharded: set[str] = set()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        placements = zip(names, tensor.placements, strict=True)
        sharded = {name for name, placement in placements if not isinstance(placement, Replicate)}
    number, index = 1, 0
    for axis, degree in axes.mesh.degrees.items():
        if axis != "pp" and axis not in sharded:
            number, index = number * degree, index * degree + axes.coordinates[axis]
    return number, index

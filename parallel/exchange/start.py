"""The start of a sharded model from a safetensors file, of Atoll or of another library: each rank reads its boxes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from atoll.parallel.exchange.shares import Share
from atoll.tensors.layout import BESIDE
from atoll.tensors.safetensors_file import NUMPY_DTYPES
from atoll.training.worker.warm_start import (
    Aliases,
    Match,
    Start,
    StartRefused,
    check_readable,
    differing,
    listed,
    match_names,
    no_safetensors,
    not_finite,
)

TRAVELLING = {"BOOL": "uint8", **dict.fromkeys(("F64", "F32", "F16", "BF16"), "float32")} | {
    f"{sign}{bits}": f"{kind}{bits}" for sign, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}
"""The dtype in which a tensor of each dtype of a file is exchanged."""


def start_shares(
    shares: Sequence[Share], names: Mapping[str, tuple[tuple[int, ...], str]], aliases: Aliases, start: Start
) -> tuple[str, list[str]]:
    """Load the values of a file into the shards of this rank, rounded to float32 and to their dtypes.

    Memory: one box. The rules are `warm_start`'s; each rank sees the faults of its boxes alone.

    Args:
        shares: the shares of this rank.
        names: the shape of each tensor of the whole model, and the dtype in which it is sent, as `Tensor.dtype`.
        aliases: the names of its tied tensors.
        start: the file.

    Returns:
        A note on tensors that were left, and the faults of the values in this rank's boxes.

    Raises:
        StartRefused: names, shapes or dtypes do not fit, or it is no safetensors file; no value is changed.
        OSError: its disk fails.
    """
    check_readable(start.path)
    try:
        with safe_open(start.path, framework="pt") as file, torch.no_grad():
            match = _match(file, names, aliases, start)
            faults = [fault for share in shares for fault in _copied(share, file, match, start.path)]
    except SafetensorError as error:
        raise no_safetensors(start.path, error) from error
    parts = (("the initial values stay in", match.own), ("not used:", match.unused))
    return "; ".join(f"{what} {listed(left)}" for what, left in parts if left), faults


def _match(file: Any, names: Mapping[str, tuple[tuple[int, ...], str]], aliases: Aliases, start: Start) -> Match:
    slices = {name: file.get_slice(name) for name in file.keys() if not name.startswith(BESIDE)}  # noqa: SIM118
    odd = [f"{name} is {s.get_dtype()}" for name, s in slices.items() if s.get_dtype() not in TRAVELLING]
    if odd:
        raise StartRefused(f"{start.path}: {listed(odd)}, and only floats, integers and bool can be exchanged")
    given = {name: _form(s.get_shape(), np.dtype(TRAVELLING[s.get_dtype()])) for name, s in slices.items()}
    initial = {name: _form(shape, NUMPY_DTYPES[dtype]) for name, (shape, dtype) in names.items()}
    match = match_names(initial, aliases, given, is_strict=start.is_strict, where=str(start.path))
    if match.faults:
        raise StartRefused(*match.faults)
    return match


def _form(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array of a shape and a dtype that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def _copied(share: Share, file: Any, match: Match, path: Path) -> list[str]:
    """Copy one box from the file to this rank's shard; return the faults of its values."""
    if (found := match.sources.get(share.name)) is None:
        return []
    boxes = [_box(file, name, share) for name in found]
    faults = [differing(found, str(path))] * any(not torch.equal(box, boxes[0]) for box in boxes[1:])
    values = boxes[0].to(torch.float32) if boxes[0].is_floating_point() else boxes[0]
    if values.is_floating_point() and not torch.isfinite(values).all():
        faults.append(not_finite(found[0], str(path)))
    share.local.copy_(values)
    return faults


def _box(file: Any, name: str, share: Share) -> torch.Tensor:
    values: torch.Tensor = file.get_slice(name)[share.slices] if share.shape else file.get_tensor(name)
    return values

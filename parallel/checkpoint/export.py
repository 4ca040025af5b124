"""A model as one safetensors file, out of a checkpoint or out of a running mesh, and from such a file into any mesh.

The file is what `parallel.parameters.state_of` says of the whole model: tied weights once, under their first name;
floats as float32, integers as they are; the names of the buffers noted in the header (`tensorfile.BUFFERS`). It is
written tensor by tensor, in canonical order: no process ever holds more of the model than its largest tensor, beside
its own shards.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.aggregation.tensors.layout import Layout, Piece, Tensor, in_order
from atoll.aggregation.tensors.safetensors_file import BUFFERS, TensorFileCorrupted, TensorFileWriter, parse_header
from atoll.parallel.checkpoint.errors import CheckpointBroken, CheckpointFailed, CheckpointMismatch, listed
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.checkpoint.reading import Entry, Saved
from atoll.parallel.checkpoint.state import MODEL, first_names, held_by
from atoll.parallel.checkpoint.store import read_about, reading

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F32",
    torch.bfloat16: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""As what each may travel."""


def export_checkpoint(path: Path, out: Path) -> tuple[Piece, ...]:
    """Write a checkpoint's model to a safetensors file, in one process.

    Args:
        path: of the checkpoint.
        out: where the file appears, complete and durable, or not at all.

    Returns:
        The pieces of the file, one for each tensor, with their digests.

    Raises:
        CheckpointBroken: it is not there, not complete, or cannot be read.
        ValueError: tensors have dtypes that may not travel; all of them are listed.
        OSError: the file cannot be written.
    """
    with reading(path):
        about, saved = read_about(path), Saved(path)
        layout = _layout({name: saved.entries[f"{MODEL}/{name}"] for name in saved.names(MODEL)})
        with TensorFileWriter(out, layout, metadata=_note(about["buffers"], layout)) as writer:
            for tensor in (tensor for tensor in layout if tensor.num_bytes):
                entry = saved.entries[f"{MODEL}/{tensor.name}"]
                values = torch.empty(entry.shape, dtype=entry.dtype)
                saved.read({f"{MODEL}/{tensor.name}": values})
                writer.append(_array(values))
            return writer.finish()


def export_model(parts: Sequence[nn.Module], out: Path, tied: Sequence[Sequence[str]] = ()) -> None:
    """Write the model of a running mesh to a safetensors file on rank 0's storage; every rank must call it.

    Args:
        parts: of this rank.
        out: where the file appears, complete and durable, or not at all.
        tied: the names of each tied weight of the whole model (`engine.ties.tied_names`).

    Raises:
        CheckpointFailed: the file cannot be written, or a tensor may not travel; on every rank.
    """
    ranks, held = Ranks(), held_by(parts, (), first_names(tied))
    try:
        mine = dict(reversed(held.tensors))  # of two copies the first, as everywhere
        entries = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in mine.items()
        }
        found = ranks.gather({"entries": entries, "buffers": sorted(held.buffers), "faults": held.faults})
        holder: dict[str, int] = {}
        whole: dict[str, Entry] = {}
        for rank, said in enumerate(found):
            for name, (dtype, shape) in said["entries"].items():
                holder.setdefault(name, rank)
                whole.setdefault(name, Entry(tuple(shape), getattr(torch, dtype)))
        if faults := [fault for said in found for fault in said["faults"]]:
            raise CheckpointFailed(f"no model was exported: {listed(faults)}")
        layout = _layout(whole)
        buffers = {name for said in found for name in said["buffers"]}
        arrays = _gathered(ranks, layout, mine, whole, holder)
        faults = []
        if ranks.is_first:
            try:
                _write(out, layout, _note(buffers, layout), arrays)
            except OSError as error:
                faults = [f"{out}: {error}"]
        for _ in arrays:
            pass  # the others send what they have, wanted or not
        ranks.insist(faults, CheckpointFailed)
    finally:
        ranks.close()


def import_model(parts: Sequence[nn.Module], file: Path, tied: Sequence[Sequence[str]] = ()) -> None:
    """Put a safetensors file into a running mesh; every rank reads what it has a share of, and must call it.

    Args:
        parts: of this rank; half-precision ones are rounded to.
        file: that every rank can read.
        tied: the names of each tied weight of the whole model (`engine.ties.tied_names`).

    Raises:
        CheckpointBroken: the file cannot be read.
        CheckpointMismatch: it is of another model; every difference is listed, and the parts are as they were.
    """
    ranks, held = Ranks(), held_by(parts, (), first_names(tied))
    try:
        there: dict[str, Tensor] = {}
        faults = list(held.faults)
        try:
            there = {tensor.name: tensor for tensor in parse_header(file)[0]}
        except (OSError, TensorFileCorrupted) as error:
            faults.append(f"{file} cannot be read: {error}")
        ranks.insist(faults, CheckpointBroken)
        found = ranks.gather([name for name, _ in held.tensors])
        faults = [fault for name, tensor in held.tensors for fault in _differences(name, tensor, there.get(name))]
        faults += [f"{name} is unknown here" for name in sorted(there.keys() - {n for names in found for n in names})]
        ranks.insist(faults, CheckpointMismatch)
        with safe_open(file, framework="pt") as opened, torch.no_grad():
            for name, tensor in held.tensors:
                _read_share(opened, name, tensor)
    finally:
        ranks.close()


def _layout(entries: Mapping[str, Entry]) -> Layout:
    strange = [f"{name} is {entry}" for name, entry in entries.items() if entry.dtype not in DTYPES]
    if strange:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"not all of the model may travel: {listed(strange)} (allowed: {allowed})")
    return in_order(Tensor(name, DTYPES[entry.dtype], entry.shape) for name, entry in entries.items())


def _note(buffers: Iterable[str], layout: Layout) -> dict[str, str]:
    floats = {tensor.name for tensor in layout if tensor.dtype == "F32"}
    return {BUFFERS: json.dumps(sorted(floats.intersection(buffers)))}


def _gathered(
    ranks: Ranks,
    layout: Layout,
    mine: Mapping[str, torch.Tensor],
    whole: Mapping[str, Entry],
    holder: Mapping[str, int],
) -> Iterator[np.ndarray[Any, Any]]:
    """On rank 0 the whole tensors, one after the other; on the others nothing, but they must be asked as well."""
    for name in (tensor.name for tensor in layout if tensor.num_bytes):
        if name in mine:
            tensor = mine[name]
            values = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().contiguous()
        elif ranks.is_first:
            values = torch.empty(whole[name].shape, dtype=whole[name].dtype)
        else:
            continue
        if holder[name] != 0 and ranks.rank == holder[name]:
            dist.send(values, dst=0, group=ranks.group)
        elif holder[name] != 0 and ranks.is_first:
            dist.recv(values, src=holder[name], group=ranks.group)
        if ranks.is_first:
            yield _array(values)


def _write(out: Path, layout: Layout, note: Mapping[str, str], arrays: Iterator[np.ndarray[Any, Any]]) -> None:
    with TensorFileWriter(out, layout, metadata=note) as writer:
        for array in arrays:
            writer.append(array)
        writer.finish()


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return array


def _differences(name: str, tensor: torch.Tensor, there: Tensor | None) -> list[str]:
    if there is None:
        return [f"{name} is missing in the file"]
    dtype = DTYPES.get(tensor.dtype, str(tensor.dtype))
    if (there.dtype, there.shape) != (dtype, tuple(tensor.shape)):
        return [f"{name} is {there.dtype} {there.shape} in the file, here {dtype} {tuple(tensor.shape)}"]
    return []


def _read_share(file: Any, name: str, tensor: torch.Tensor) -> None:
    """Of a sharded tensor, the box that PyTorch says this rank has of it."""
    if not tensor.ndim:
        _local(tensor).copy_(file.get_tensor(name))
    elif isinstance(tensor, DTensor):
        for box in tensor.__create_chunk_list__():  # type: ignore[no-untyped-call]
            ends = (start + length for start, length in zip(box.offsets, box.sizes, strict=True))
            values = file.get_slice(name)[tuple(map(slice, box.offsets, ends))]
            _local(tensor).copy_(values)
    else:
        tensor.copy_(file.get_tensor(name))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""The export of a model as one safetensors file, from a checkpoint or a running mesh, and the import into any mesh.

The file has the tensors of `training.model.parameters.state_of` of the whole model: tied weights once, under their
first name; floats as float32, bool as uint8, other integers unchanged; the names of the buffers in the header
(`safetensors_file.BUFFERS`). It is written tensor by tensor, in canonical order: no process ever holds more of the
model than its largest tensor, beside its own shards.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.parallel.checkpoint.errors import CheckpointBroken, CheckpointFailed, CheckpointMismatch, listed
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.checkpoint.reading import Entry, Saved
from atoll.parallel.checkpoint.state import MODEL, first_names, local_state
from atoll.parallel.checkpoint.store import damage, read_about, reading
from atoll.tensors.layout import Layout, Piece, Tensor, in_order
from atoll.tensors.safetensors_file import BUFFERS, TensorFileCorrupted, TensorFileWriter, parse_header
from atoll.training.optimizers.norms import local

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F32",
    torch.bfloat16: "F32",
    torch.float64: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "U8",
}
"""The dtype in which a tensor of each dtype is exchanged, by its safetensors name."""


def export_checkpoint(path: Path, out: Path) -> tuple[Piece, ...]:
    """Write a checkpoint's model to a safetensors file, in one process.

    Args:
        path: the path of the checkpoint.
        out: the file, which appears complete and durable, or not at all.

    Returns:
        The pieces of the file, one for each tensor, with their digests.

    Raises:
        CheckpointBroken: it does not exist, is not complete, damaged, or cannot be read.
        ValueError: tensors have dtypes that cannot be exchanged; all of them are listed.
        OSError: the file cannot be written.
    """
    with reading(path):
        if faults := damage(path):
            raise CheckpointBroken(listed(faults))
        about, saved = read_about(path), Saved(path)
        layout = _layout({name: saved.entries[f"{MODEL}/{name}"] for name in saved.names(MODEL)})
        with TensorFileWriter(out, layout, metadata=_metadata(about["buffers"], layout)) as writer:
            for tensor in (tensor for tensor in layout if tensor.num_bytes):
                entry = saved.entries[f"{MODEL}/{tensor.name}"]
                values = torch.empty(entry.shape, dtype=entry.dtype)
                saved.read({f"{MODEL}/{tensor.name}": values})
                writer.append(_array(values))
            return writer.finish()


def export_model(
    parts: Sequence[nn.Module], out: Path, tied: Sequence[Sequence[str]] = (), without: Collection[str] = ()
) -> None:
    """Write the model of a running mesh to a safetensors file on rank 0's storage; every rank must call it.

    Args:
        parts: the parts of this rank.
        out: the file, which appears complete and durable, or not at all.
        tied: the names of each tied weight of the whole model (`engine.ties.tied_names`).
        without: the names of tensors that are not exchanged.

    Raises:
        CheckpointFailed: the file cannot be written, or a tensor cannot be exchanged; on every rank.
    """
    ranks, local = Ranks(), local_state(parts, (), first_names(tied), without)
    try:
        tensors = dict(reversed(local.tensors))  # of two copies the first, as everywhere
        entries = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
        }
        reports = ranks.gather({"entries": entries, "buffers": sorted(local.buffers), "faults": local.faults})
        holder: dict[str, int] = {}
        whole: dict[str, Entry] = {}
        for rank, report in enumerate(reports):
            for name, (dtype, shape) in report["entries"].items():
                holder.setdefault(name, rank)
                whole.setdefault(name, Entry(tuple(shape), getattr(torch, dtype)))
        if faults := [fault for report in reports for fault in report["faults"]]:
            raise CheckpointFailed(f"no model was exported: {listed(faults)}")
        layout = _layout(whole)
        buffers = {name for report in reports for name in report["buffers"]}
        arrays = _gathered(ranks, layout, tensors, whole, holder)
        faults = []
        if ranks.is_first:
            try:
                _write(out, layout, _metadata(buffers, layout), arrays)
            except OSError as error:
                faults = [f"{out}: {error}"]
        for _ in arrays:
            pass  # the other ranks send their tensors; rank 0 receives them even after a fault
        ranks.raise_if_any(faults, CheckpointFailed)
    finally:
        ranks.close()


def import_model(parts: Sequence[nn.Module], file: Path, tied: Sequence[Sequence[str]] = ()) -> None:
    """Load a safetensors file into a running mesh; every rank reads its share of it, and must call it.

    Args:
        parts: the parts of this rank; values are rounded to half-precision ones.
        file: readable by every rank.
        tied: the names of each tied weight of the whole model (`engine.ties.tied_names`).

    Raises:
        CheckpointBroken: the file cannot be read.
        CheckpointMismatch: it is of another model; every difference is listed, and the parts are unchanged.
    """
    ranks, local = Ranks(), local_state(parts, (), first_names(tied))
    try:
        in_file: dict[str, Tensor] = {}
        faults = list(local.faults)
        try:
            in_file = {tensor.name: tensor for tensor in parse_header(file)[0]}
        except (OSError, TensorFileCorrupted) as error:
            faults.append(f"{file} cannot be read: {error}")
        ranks.raise_if_any(faults, CheckpointBroken)
        found = ranks.gather([name for name, _ in local.tensors])
        faults = [fault for name, tensor in local.tensors for fault in _differences(name, tensor, in_file.get(name))]
        faults += [f"{name} is unknown here" for name in sorted(in_file.keys() - {n for names in found for n in names})]
        ranks.raise_if_any(faults, CheckpointMismatch)
        with safe_open(file, framework="pt") as opened, torch.no_grad():
            for name, tensor in local.tensors:
                _read_share(opened, name, tensor)
    finally:
        ranks.close()


def _layout(entries: Mapping[str, Entry]) -> Layout:
    wrong = [f"{name} is {entry}" for name, entry in entries.items() if entry.dtype not in DTYPES]
    if wrong:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"tensors have dtypes that cannot be exchanged: {listed(wrong)} (allowed: {allowed})")
    return in_order(Tensor(name, DTYPES[entry.dtype], entry.shape) for name, entry in entries.items())


def _metadata(buffers: Iterable[str], layout: Layout) -> dict[str, str]:
    floats = {tensor.name for tensor in layout if tensor.dtype == "F32"}
    return {BUFFERS: json.dumps(sorted(floats.intersection(buffers)))}


def _gathered(
    ranks: Ranks,
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    whole: Mapping[str, Entry],
    holder: Mapping[str, int],
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the whole tensors on rank 0, one after the other; other ranks yield none, but must iterate as well."""
    for name in (tensor.name for tensor in layout if tensor.num_bytes):
        if name in tensors:
            tensor = tensors[name]
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


def _write(out: Path, layout: Layout, metadata: Mapping[str, str], arrays: Iterator[np.ndarray[Any, Any]]) -> None:
    with TensorFileWriter(out, layout, metadata=metadata) as writer:
        for array in arrays:
            writer.append(array)
        writer.finish()


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    stored = (
        torch.uint8 if tensor.dtype == torch.bool else torch.float32 if tensor.is_floating_point() else tensor.dtype
    )
    array: np.ndarray[Any, Any] = tensor.to(stored).numpy()
    return array


def _differences(name: str, tensor: torch.Tensor, in_file: Tensor | None) -> list[str]:
    if in_file is None:
        return [f"{name} is missing in the file"]
    dtype = DTYPES.get(tensor.dtype, str(tensor.dtype))
    if (in_file.dtype, in_file.shape) != (dtype, tuple(tensor.shape)):
        return [f"{name} is {in_file.dtype} {in_file.shape} in the file, here {dtype} {tuple(tensor.shape)}"]
    return []


def _read_share(file: Any, name: str, tensor: torch.Tensor) -> None:
    """Read a tensor; of a sharded one the box that PyTorch assigns to this rank."""
    if not tensor.ndim:
        local(tensor).copy_(file.get_tensor(name))
    elif isinstance(tensor, DTensor):
        for box in tensor.__create_chunk_list__():  # type: ignore[no-untyped-call]
            ends = (start + length for start, length in zip(box.offsets, box.sizes, strict=True))
            values = file.get_slice(name)[tuple(map(slice, box.offsets, ends))]
            local(tensor).copy_(values)
    else:
        tensor.copy_(file.get_tensor(name))

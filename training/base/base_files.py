"""The safetensors files of a base: their tensors by name, read by boxes, and the lines of their digest.

Values are read by blocks of rows, so that no second copy of a tensor is in memory.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from atoll.task.errors import TaskMismatch
from atoll.training.base.digests import line

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"

BLOCK_BYTES = 16 << 20
"""Bytes of a tensor that are read at a time."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of files that a model may have, by their safetensors names."""


class BaseRefused(TaskMismatch):
    """The files do not fit the model as a base; the message lists every difference."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file, read by boxes."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, box: Sequence[slice], into: torch.Tensor) -> None:
        """Copy a box of the tensor, block by block, rounded to the dtype of `into`.

        Args:
            box: one slice of each axis.
            into: a tensor of the box's shape.
        """
        with torch.no_grad():
            for rows, values in self.blocks(box):
                (into[rows] if into.ndim else into).copy_(values)

    def equals(self, other: "Stored", box: Sequence[slice]) -> bool:
        """Return whether another stored tensor has the same values in a box."""
        pairs = zip(self.blocks(box), other.blocks(box), strict=True)
        return all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)

    def line(self) -> str:
        """Return the tensor's line in a digest (`digests.line`)."""
        digest = hashlib.sha256()
        for _, values in self.blocks([slice(0, length) for length in self.shape]):
            digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return line(str(self.dtype).removeprefix("torch."), self.shape, digest.hexdigest())

    def blocks(self, box: Sequence[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Read a box of the tensor, and yield its blocks of rows: the slice of rows in the box, and their values."""
        with safe_open(self.file, framework="pt") as file:
            if not self.shape:
                yield slice(None), file.get_tensor(self.name)
                return
            stored, first = file.get_slice(self.name), box[0]
            row_bytes = prod(axis.stop - axis.start for axis in box[1:]) * self.dtype.itemsize
            step = max(1, BLOCK_BYTES // max(1, row_bytes))
            for start in range(first.start, first.stop, step):
                stop = min(start + step, first.stop)
                yield slice(start - first.start, stop - first.start), stored[(slice(start, stop), *box[1:])]


def stored_in(path: Path) -> dict[str, Stored]:
    """Return the tensors of a folder of safetensors files, or of one such file, by name.

    With an index (`*.safetensors.index.json`) the names come from its `weight_map`, else from all files.

    Raises:
        BaseRefused: there are no such files, one is damaged or missing, a name is in two; the message lists all.
    """
    found: dict[str, Stored] = {}
    faults: list[str] = []
    wanted = _index_of(path)
    for file in _files_of(path, wanted):
        try:
            for stored in _tensors_of(file):
                if wanted is not None and wanted.get(stored.name) != file.name:
                    continue
                if stored.name in found:
                    faults.append(f"{stored.name} is in {found[stored.name].file.name} and in {file.name}")
                found[stored.name] = stored
        except (SafetensorError, OSError) as error:
            faults.append(f"{file.name} cannot be read: {error}")
        except KeyError as error:
            faults.append(f"{file.name} has tensors of dtype {error.args[0]} (allowed: {', '.join(DTYPES)})")
    if not faults and wanted is not None:
        faults += [f"{name} is not in {file}, as the index says" for name, file in wanted.items() if name not in found]
    if faults:
        raise BaseRefused(f"base {path}: {'; '.join(faults)}")
    return found


def _index_of(path: Path) -> dict[str, str] | None:
    """Return the path of each tensor's file from the index of a folder; None: the folder has no index."""
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}")) if path.is_dir() else []
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise BaseRefused(f"base {path}: it has several indices ({names}); give each model a separate folder")
    if not indices:
        return None
    try:
        weights: Any = json.loads(indices[0].read_text("utf-8"))["weight_map"]
        if not (isinstance(weights, dict) and all(isinstance(file, str) for file in weights.values())):
            raise ValueError("weight_map is not a table of file names")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BaseRefused(f"base {path}: {indices[0].name} cannot be read: {error!r}") from error
    return weights


def _files_of(path: Path, wanted: dict[str, str] | None) -> list[Path]:
    if wanted is not None:
        return [path / file for file in dict.fromkeys(wanted.values())]
    files = [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        what = f"it has no {SUFFIX} file" if path.is_dir() else "there is no such file or folder"
        raise BaseRefused(f"base {path}: {what}; give the folder of a model's safetensors files")
    return files


def _tensors_of(file: Path) -> Iterator[Stored]:
    with file.open("rb"):
        pass  # an error here is clearer than the library's
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            stored = opened.get_slice(name)
            yield Stored(file, name, DTYPES[stored.get_dtype()], tuple(stored.get_shape()))

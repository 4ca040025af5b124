"""The reading of a checkpoint's tensors into the tensors of this process, without communication.

PyTorch's reader and planner determine which bytes of which files a shard needs (`torch.distributed.checkpoint`).
Tensors are loaded as weights only. `.metadata` is a pickle, as PyTorch has no other form: only the few classes of a
table of contents may be unpickled, any other is an error. Even so a checkpoint is a private file of its training: it is
no format to accept from strangers; an export (`export.py`) is.
"""

import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from atoll.parallel.checkpoint.errors import CheckpointBroken, reason

CONTENTS = ".metadata"
"""The table of contents of a checkpoint, under PyTorch's name for it."""

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # of Python 3.13
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a table of contents")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / CONTENTS).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        return metadata


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint, with its global shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


class Saved:
    """The tensors of one checkpoint, by key.

    Raises:
        CheckpointBroken: its table of contents is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = _Reader(path)
        try:
            self._metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, IndexError, TypeError) as error:
            raise CheckpointBroken(f"{path / CONTENTS} cannot be read: {reason(error)}") from error
        self.entries = {
            key: Entry(tuple(entry.size), entry.properties.dtype)
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def names(self, kind: str) -> list[str]:
        """Return the parts of the keys after `kind/`, sorted."""
        return sorted(key.removeprefix(f"{kind}/") for key in self.entries if key.startswith(f"{kind}/"))

    def read_values(self, keys: Iterable[str]) -> list[Any]:
        """Return JSON values that were saved as bytes. Raises as `read`."""
        raw = {key: torch.empty(self.entries[key].shape, dtype=torch.uint8) for key in keys}
        self.read(raw)
        return [json.loads(value.numpy().tobytes()) for value in raw.values()]

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors, sharded or whole, with the checkpoint's values under their keys.

        Raises:
            CheckpointBroken: a file is missing or its bytes are wrong.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=False)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, EOFError, RuntimeError, AssertionError, pickle.UnpicklingError) as error:
            raise CheckpointBroken(f"{self._path} cannot be read: {reason(error)}") from error

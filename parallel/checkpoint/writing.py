"""The writing of a checkpoint's tensors by PyTorch's writer, with the SHA-256 of each file while it is written.

Each rank hashes the bytes on their way to the disk, so no file is read again; rank 0 gets the digests of all ranks with
PyTorch's results, before it writes the table of contents.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, _FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from atoll.ground.file_digest import HashedFile

_DIGESTS = MetadataIndex("digests")
"""The place of a rank's digests among its results; it is in no table of contents."""


class _Hashing(FileSystem):
    """A file system with the SHA-256 of each file that was written, by its name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashed = HashedFile(stream)  # type: ignore[arg-type]
            yield hashed
        self.digests[Path(path).name] = hashed.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class Writer(_FileSystemWriter):
    """The writer of one checkpoint.

    Args:
        folder: the folder of its files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = self._hashing = _Hashing()

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of every file of all ranks, by name; on rank 0, once all are written."""
        return self._hashing.digests

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, as PyTorch does; its digest is one more result."""
        results = super().write_data(plan, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(_DIGESTS, 0, dict(self.digests))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the table of contents, as PyTorch does, on rank 0."""
        for result in (result for rank in results for result in rank if result.index == _DIGESTS):
            self.digests.update(result.storage_data)
        super().finish(metadata, [[result for result in rank if result.index != _DIGESTS] for rank in results])

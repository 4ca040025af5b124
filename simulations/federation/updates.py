"""The updates that wait for a fold: their bytes, and what the fold's plan has to know of them."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.aggregation.blocks import StoredUpdate, UpdateReader
from atoll.aggregation.cuts import layout_of_pieces
from atoll.aggregation.inspection import inspect
from atoll.aggregation.layout import Piece, Tensor
from atoll.aggregation.means import Weighted
from atoll.aggregation.tensorfile import NUMPY_DTYPES, parse_header
from atoll.parallel.arrays import Arrays, layout_of
from atoll.protocol.vocabulary import ClientId, Digest, RoundId
from atoll.server.plan import FoldPlan

IN_MEMORY_MAX = 1 << 30
"""Bytes of updates that are held in memory; those that come beyond them lie in files until they are folded."""


@dataclass(frozen=True, slots=True)
class Meta:
    """What the plan of a fold has to know of an update; see `server.plan.Known`."""

    magnitudes: Mapping[str, float | int]
    squared_norms: Mapping[str, float]
    steps: tuple[float, float] = (1.0, 1.0)
    rank: int = 0


class Updates:
    """Those that a fold may still ask for.

    Args:
        folder: for what does not fit into memory, and for encoded ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        self._held: dict[Digest, tuple[StoredUpdate, Meta]] = {}
        self._in_memory = 0

    @staticmethod
    def digest_of(client_id: ClientId, round_id: RoundId, steps: int | None) -> Digest:
        """Of what a client makes in a round by so many steps: what comes out is a function of these.

        A stand-in, since nobody has to verify it: that of the manifest costs a pass over all bytes.
        """
        return Digest(hashlib.sha256(f"{client_id} {round_id} {steps}".encode()).hexdigest())

    def add(self, digest: Digest, update: Arrays, report: Mapping[str, Any]) -> int:
        """Take a plain update; its size [bytes]."""
        layout = layout_of(update)
        pieces = tuple(_whole(tensor) for tensor in layout)
        data = b"".join(np.ascontiguousarray(update[tensor.name]).data for tensor in layout)
        self._take(digest, pieces, data, report)
        return len(data)

    def add_encoded(self, digest: Digest, file: Path, pieces: tuple[Piece, ...], report: Mapping[str, Any]) -> int:
        """Take an encoded one from its file, which goes; its size [bytes]."""
        _, data_start = parse_header(file)
        with file.open("rb") as source:
            source.seek(data_start)
            data = source.read()
        file.unlink()
        self._take(digest, pieces, data, report)
        return len(data)

    def _take(self, digest: Digest, pieces: tuple[Piece, ...], data: bytes, report: Mapping[str, Any]) -> None:
        path = self.folder / digest
        found = inspect(path, pieces, data=data)
        if self._in_memory + len(data) > IN_MEMORY_MAX:
            path.write_bytes(data)
            stored = StoredUpdate(path, pieces, found.magnitudes)
        else:
            self._in_memory += len(data)
            stored = StoredUpdate(path, pieces, found.magnitudes, data=data)
        steps = report.get("normalizer", 1.0), report.get("effective_steps", 1.0)
        self._held[digest] = stored, Meta(found.magnitudes, found.squared_norms, steps)

    def metas(self, digests: Collection[Digest]) -> dict[Digest, Meta]:
        """What is known of these."""
        return {digest: self._held[digest][1] for digest in digests}

    def weighted(self, plan: FoldPlan) -> list[Weighted]:
        """A fold's updates, in its order."""
        return [
            Weighted(self._held[planned.digest][0], planned.weight, planned.factor, planned.trained_factor)
            for planned in plan.updates
        ]

    def arrays(self, digest: Digest) -> Arrays:
        """The values of an update, decoded."""
        stored, _ = self._held[digest]
        layout = layout_of_pieces(stored.pieces)
        with UpdateReader(stored) as reader:
            return {
                tensor.name: reader.read(tensor, 0, tensor.num_elements)
                .astype(NUMPY_DTYPES[tensor.dtype], copy=False)
                .reshape(tensor.shape)
                for tensor in layout
            }

    def replace(self, digest: Digest, update: Arrays) -> None:
        """Let an update be another one, plain."""
        report = dict(zip(("normalizer", "effective_steps"), self._held[digest][1].steps, strict=True))
        self._forget(digest)
        self.add(digest, update, report)

    def keep_only(self, digests: Collection[Digest]) -> None:
        """Forget all others."""
        for digest in self._held.keys() - set(digests):
            self._forget(digest)

    def _forget(self, digest: Digest) -> None:
        stored, _ = self._held.pop(digest)
        if stored.data is not None:
            self._in_memory -= len(stored.data)
        else:
            stored.path.unlink(missing_ok=True)


def _whole(tensor: Tensor) -> Piece:
    return Piece(tensor.name, tensor.dtype, (0,) * len(tensor.shape), tensor.shape, "")

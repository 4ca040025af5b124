"""The updates that wait for a fold: their values, and the metadata for the plan of the fold.

Plain updates of float tensors stay in the rows into which an engine wrote them, and are folded from there. All others
(encoded, with integers, or for a rule that reads files) are stored as on a coordinator, and folded by its reducer.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.means import Weighted
from atoll.protocol.vocabulary import ClientId, Digest, RoundId
from atoll.server.errors import StoreCorrupted
from atoll.server.folding.plan import FoldPlan
from atoll.task.arrays import Arrays, layout_of
from atoll.task.errors import TaskBroken
from atoll.tensors.codecs.names import open_codec
from atoll.tensors.layout import Layout, Piece
from atoll.tensors.pieces import layout_of_pieces
from atoll.tensors.safetensors_file import NUMPY_DTYPES, parse_header
from atoll.tensors.updates.inspection import inspect
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader

IN_MEMORY_MAX = 1 << 30
"""Maximum number of bytes of updates in memory; further updates are files until they are folded."""

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SavedUpdate:
    """Entry of an update in a snapshot; its bytes are in a file named by its digest."""

    digest: Digest
    steps: tuple[float, float]
    pieces: tuple[Piece, ...] = ()
    """Pieces of the update; empty: it is a row."""
    magnitudes: Mapping[str, float | int] = field(default_factory=dict)
    squared_norms: Mapping[str, float] = field(default_factory=dict)
    of_row: tuple[float, ...] | None = None
    """Magnitudes of a row."""


@dataclass(frozen=True, slots=True)
class Meta:
    """Metadata of an update for the plan of a fold; it implements `Known`."""

    magnitudes: Mapping[str, float | int]
    squared_norms: Mapping[str, float]
    steps: tuple[float, float] = (1.0, 1.0)
    rank: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """Update of pieces, in memory or in a file, with its metadata."""

    stored: StoredUpdate
    meta: Meta


class Row(NamedTuple):
    """Update of float tensors, side by side; a tuple, because there are many."""

    values: NDArray[np.float32]
    """All values (F,)."""
    magnitudes: NDArray[np.float32] | None
    """The magnitude of each tensor (T,), if an engine has measured it."""
    steps: tuple[float, float]


class Updates:
    """Updates that a fold may still need.

    Args:
        folder: the folder for updates that do not fit into memory.
        layout: the layout of the model, in canonical order; None: no updates are stored as rows.
        saved: the updates of a snapshot, whose files are complete.

    Raises:
        StoreCorrupted: one of the saved updates cannot be decoded.
    """

    def __init__(self, folder: Path, layout: Layout | None, saved: Sequence[SavedUpdate] = ()) -> None:
        self.folder, self._layout = folder, layout
        folder.mkdir(parents=True, exist_ok=True)
        self._entries: dict[Digest, Entry] = {}
        self._in_memory = 0
        self._rows: dict[Digest, Row] = {}
        for update in saved:
            self._restore(update)
        self._written = frozenset[Digest](), frozenset(update.digest for update in saved)
        """Updates that were written to files for the last two snapshots."""
        for path in folder.iterdir():
            if path.name not in self._written[1]:
                path.unlink()

    @staticmethod
    def digest_of(client_id: ClientId, round_id: RoundId, steps: int | None) -> Digest:
        """Return a digest of the arguments, which determine the update.

        It replaces the digest of the manifest, which would cost a pass over all bytes and is not verified here.
        """
        return Digest(hashlib.sha256(f"{client_id} {round_id} {steps}".encode()).hexdigest())

    # ------------------------------------------------------------ in

    def add(
        self,
        digest: Digest,
        update: Arrays,
        report: Report,
        row: NDArray[Any] | None = None,
        magnitudes: NDArray[Any] | None = None,
    ) -> int:
        """Store a plain update; return its size [bytes].

        Args:
            digest: its digest.
            update: its tensors.
            report: the client's report.
            row: all its values, side by side, which no longer change.
            magnitudes: the magnitudes of the row, as in `Trained`.
        """
        if self._layout is not None:
            if row is None:
                row = np.concatenate([update[tensor.name].reshape(-1) for tensor in self._layout])
                magnitudes = None
            self._rows[digest] = Row(row, magnitudes, _steps_of(report))
            return row.nbytes
        layout = layout_of(update)
        pieces = tuple(Piece(t.name, t.dtype, (0,) * len(t.shape), t.shape, "") for t in layout)
        data = b"".join(np.ascontiguousarray(update[tensor.name]).data for tensor in layout)
        self._store(digest, pieces, data, report)
        return len(data)

    def add_encoded(self, digest: Digest, file: Path, pieces: tuple[Piece, ...], report: Report) -> int:
        """Store an encoded update from its file, and delete the file; return its size [bytes]."""
        _, data_start = parse_header(file)
        with file.open("rb") as source:
            source.seek(data_start)
            data = source.read()
        file.unlink()
        self._store(digest, pieces, data, report)
        return len(data)

    def _store(self, digest: Digest, pieces: tuple[Piece, ...], data: bytes, report: Report) -> None:
        is_named = digest in self._written[0] | self._written[1]
        path = self.folder / (f"{digest}.forged" if is_named else digest)  # never overwrite a file of a snapshot
        inspected = inspect(path, pieces, data=data)
        if inspected.malformed:  # a deployed update would be refused; here both sides are one codec, which is broken
            name, fault = min(inspected.malformed.items())
            raise TaskBroken(f"the update cannot be decoded: {name}: {fault}")
        if self._in_memory + len(data) > IN_MEMORY_MAX:
            path.write_bytes(data)
            stored = StoredUpdate(path, pieces, inspected.magnitudes)
        else:
            self._in_memory += len(data)
            stored = StoredUpdate(path, pieces, inspected.magnitudes, data=data)
        meta = Meta(inspected.magnitudes, inspected.squared_norms, _steps_of(report))
        self._entries[digest] = Entry(stored, meta)

    # ------------------------------------------------------------ interruptions

    def write(self, digests: Collection[Digest]) -> tuple[SavedUpdate, ...]:
        """Write these updates to files for a snapshot; the files stay until two further calls."""
        saved = tuple(self._saved(digest) for digest in digests)
        for digest in self._written[0] - self._written[1] - frozenset(digests):
            if digest not in self._entries or self._entries[digest].stored.data is not None:
                (self.folder / digest).unlink(missing_ok=True)
        self._written = self._written[1], frozenset(digests)
        return saved

    def _saved(self, digest: Digest) -> SavedUpdate:
        if (row := self._rows.get(digest)) is not None:
            self._write_once(digest, row.values.data)
            of_row = None if row.magnitudes is None else tuple(row.magnitudes.tolist())
            return SavedUpdate(digest, row.steps, of_row=of_row)
        stored, meta = self._entries[digest].stored, self._entries[digest].meta
        if stored.data is not None:
            self._write_once(digest, stored.data)
        return SavedUpdate(digest, meta.steps, stored.pieces, meta.magnitudes, meta.squared_norms)

    def _write_once(self, digest: Digest, data: bytes | memoryview) -> None:
        """Write a file, but never overwrite one of an earlier snapshot, as this process may end during the write."""
        if digest not in self._written[0] | self._written[1]:
            (self.folder / digest).write_bytes(data)

    def _restore(self, saved: SavedUpdate) -> None:
        path = self.folder / saved.digest
        try:
            for codec in {piece.codec for piece in saved.pieces if piece.codec}:
                open_codec(codec)
        except ValueError as error:
            raise StoreCorrupted(f"{path}: an update that the run needs cannot be decoded: {error}") from error
        if not saved.pieces:
            of_row = None if saved.of_row is None else np.array(saved.of_row, np.float32)
            self._rows[saved.digest] = Row(np.fromfile(path, np.float32), of_row, saved.steps)
            return
        size = sum(piece.num_bytes for piece in saved.pieces)
        data = path.read_bytes() if self._in_memory + size <= IN_MEMORY_MAX else None
        self._in_memory += size if data is not None else 0
        stored = StoredUpdate(path, saved.pieces, saved.magnitudes, data=data)
        self._entries[saved.digest] = Entry(stored, Meta(saved.magnitudes, saved.squared_norms, saved.steps))

    # ------------------------------------------------------------ out

    def rows(self, digests: Sequence[Digest]) -> list[Row]:
        """Return the rows of these updates, in their order."""
        return [self._rows[digest] for digest in digests]

    def metas(self, digests: Collection[Digest]) -> dict[Digest, Meta]:
        """Return the metadata of these updates."""
        return {digest: self._entries[digest].meta for digest in digests}

    def weighted(self, plan: FoldPlan) -> list[Weighted]:
        """Return the updates of a fold with their weights, in the order of the plan."""
        return [
            Weighted(self._entries[planned.digest].stored, planned.weight, planned.factor, planned.trained_factor)
            for planned in plan.updates
        ]

    def arrays(self, digest: Digest) -> Arrays:
        """Return the decoded values of an update."""
        if digest in self._rows:
            return self._views(self._rows[digest].values.copy())
        stored = self._entries[digest].stored
        with UpdateReader(stored) as reader:
            return {
                tensor.name: reader.read(tensor, 0, tensor.num_elements)
                .astype(NUMPY_DTYPES[tensor.dtype], copy=False)
                .reshape(tensor.shape)
                for tensor in layout_of_pieces(stored.pieces)
            }

    def _views(self, row: NDArray[Any]) -> Arrays:
        assert self._layout is not None
        views, start = {}, 0
        for tensor in self._layout:
            views[tensor.name] = row[start : start + tensor.num_elements].reshape(tensor.shape)
            start += tensor.num_elements
        return views

    def replace(self, digest: Digest, update: Arrays) -> None:
        """Replace the values of an update by unencoded ones."""
        steps = self._rows[digest].steps if digest in self._rows else self._entries[digest].meta.steps
        self._drop(digest)
        self.add(digest, update, dict(zip(("normalizer", "effective_steps"), steps, strict=True)))

    def keep_only(self, digests: Collection[Digest]) -> None:
        """Drop all other updates."""
        for digest in (self._entries.keys() | self._rows.keys()) - set(digests):
            self._drop(digest)

    def _drop(self, digest: Digest) -> None:
        if self._rows.pop(digest, None) is not None:
            return
        stored = self._entries.pop(digest).stored
        if stored.data is not None:
            self._in_memory -= len(stored.data)
        elif stored.path.name not in self._written[0] | self._written[1]:
            stored.path.unlink(missing_ok=True)


def _steps_of(report: Report) -> tuple[float, float]:
    return report.get("normalizer", 1.0), report.get("effective_steps", 1.0)

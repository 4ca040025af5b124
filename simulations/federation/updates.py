"""The updates that wait for a fold: their values, and what the fold's plan has to know of them.

Plain updates of float tensors stay in the rows in which an engine has left them, and are folded from there. All others
(encoded, with integers, or for a rule that wants files) are held as the coordinator holds them, and go through its own
fold.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.means import Weighted
from atoll.aggregation.tensors.layout import Layout, Piece
from atoll.aggregation.tensors.pieces import layout_of_pieces
from atoll.aggregation.tensors.safetensors_file import NUMPY_DTYPES, parse_header
from atoll.aggregation.updates.inspection import inspect
from atoll.aggregation.updates.reader import StoredUpdate, UpdateReader
from atoll.parallel.task.arrays import Arrays, layout_of
from atoll.protocol.vocabulary import ClientId, Digest, RoundId
from atoll.server.errors import StoreCorrupted
from atoll.server.folding.plan import FoldPlan

IN_MEMORY_MAX = 1 << 30
"""Bytes of updates that are held in memory; those that come beyond them lie in files until they are folded."""

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """An update whose bytes lie in a file of its digest's name, as who goes on with an interrupted run needs it."""

    digest: Digest
    steps: tuple[float, float]
    pieces: tuple[Piece, ...] = ()
    """None: it is a row."""
    magnitudes: Mapping[str, float | int] = field(default_factory=dict)
    squared_norms: Mapping[str, float] = field(default_factory=dict)
    of_row: tuple[float, ...] | None = None
    """A row's magnitudes."""


@dataclass(frozen=True, slots=True)
class Meta:
    """What the plan of a fold has to know of an update; see `server.plan.Known`."""

    magnitudes: Mapping[str, float | int]
    squared_norms: Mapping[str, float]
    steps: tuple[float, float] = (1.0, 1.0)
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """An update in memory, or in a file."""

    stored: StoredUpdate
    meta: Meta


class Row(NamedTuple):
    """An update of float tensors, side by side; a tuple, for so many are kept."""

    values: NDArray[np.float32]
    """(F)"""
    magnitudes: NDArray[np.float32] | None
    """(T) of each tensor, where an engine has looked."""
    steps: tuple[float, float]


class Updates:
    """Those that a fold may still ask for.

    Args:
        folder: for what does not fit into memory.
        layout: of the model, in canonical order; None: no updates are held as rows.
        kept: that an interrupted run has left.

    Raises:
        StoreCorrupted: one of these is not there, or not whole.
    """

    def __init__(self, folder: Path, layout: Layout | None, kept: Sequence[Kept] = ()) -> None:
        self.folder, self._layout = folder, layout
        folder.mkdir(parents=True, exist_ok=True)
        self._held: dict[Digest, Held] = {}
        self._in_memory = 0
        self._rows: dict[Digest, Row] = {}
        for update in kept:
            self._take_up(update)
        self._written = frozenset[Digest](), frozenset(update.digest for update in kept)
        """Those that are files for an interrupted run: of the last but one, and of the last time."""
        for path in folder.iterdir():
            if path.name not in self._written[1]:
                path.unlink()

    @staticmethod
    def digest_of(client_id: ClientId, round_id: RoundId, steps: int | None) -> Digest:
        """Of what a client makes in a round by so many steps: what comes out is a function of these.

        A stand-in, since nobody has to verify it: that of the manifest costs a pass over all bytes.
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
        """Take a plain update; its size [bytes].

        Args:
            digest: its name.
            update: its tensors.
            report: what the client says beside it.
            row: all its values, side by side, which nobody changes any more.
            magnitudes: of the row; see `engine.Trained`.
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
        self._hold(digest, pieces, data, report)
        return len(data)

    def add_encoded(self, digest: Digest, file: Path, pieces: tuple[Piece, ...], report: Report) -> int:
        """Take an encoded one from its file, which goes; its size [bytes]."""
        _, data_start = parse_header(file)
        with file.open("rb") as source:
            source.seek(data_start)
            data = source.read()
        file.unlink()
        self._hold(digest, pieces, data, report)
        return len(data)

    def _hold(self, digest: Digest, pieces: tuple[Piece, ...], data: bytes, report: Report) -> None:
        is_named = digest in self._written[0] | self._written[1]
        path = self.folder / (f"{digest}.forged" if is_named else digest)  # never over what a saved state names
        found = inspect(path, pieces, data=data)
        if self._in_memory + len(data) > IN_MEMORY_MAX:
            path.write_bytes(data)
            stored = StoredUpdate(path, pieces, found.magnitudes)
        else:
            self._in_memory += len(data)
            stored = StoredUpdate(path, pieces, found.magnitudes, data=data)
        self._held[digest] = Held(stored, Meta(found.magnitudes, found.squared_norms, _steps_of(report)))

    # ------------------------------------------------------------ interruptions

    def write(self, digests: Collection[Digest]) -> tuple[Kept, ...]:
        """Let these be files until this was called twice again: a process that ends meanwhile may need them."""
        kept = tuple(self._written_down(digest) for digest in digests)
        for digest in self._written[0] - self._written[1] - frozenset(digests):
            if digest not in self._held or self._held[digest].stored.data is not None:
                (self.folder / digest).unlink(missing_ok=True)
        self._written = self._written[1], frozenset(digests)
        return kept

    def _written_down(self, digest: Digest) -> Kept:
        if (row := self._rows.get(digest)) is not None:
            self._write_once(digest, row.values.data)
            of_row = None if row.magnitudes is None else tuple(row.magnitudes.tolist())
            return Kept(digest, row.steps, of_row=of_row)
        stored, meta = self._held[digest].stored, self._held[digest].meta
        if stored.data is not None:
            self._write_once(digest, stored.data)
        return Kept(digest, meta.steps, stored.pieces, meta.magnitudes, meta.squared_norms)

    def _write_once(self, digest: Digest, data: bytes | memoryview) -> None:
        """Never over the file that the state before names: this process may end in the middle."""
        if digest not in self._written[0] | self._written[1]:
            (self.folder / digest).write_bytes(data)

    def _take_up(self, kept: Kept) -> None:
        path = self.folder / kept.digest
        wanted = sum(piece.num_bytes for piece in kept.pieces or self._layout or ())
        try:
            size = path.stat().st_size
        except OSError as error:
            raise StoreCorrupted(f"{path}: the update that the run goes on with is gone: {error}") from error
        if size != wanted:
            raise StoreCorrupted(f"{path}: the update that the run goes on with has {size} bytes, not {wanted}")
        if not kept.pieces:
            of_row = None if kept.of_row is None else np.array(kept.of_row, np.float32)
            self._rows[kept.digest] = Row(np.fromfile(path, np.float32), of_row, kept.steps)
            return
        data = path.read_bytes() if self._in_memory + size <= IN_MEMORY_MAX else None
        self._in_memory += size if data is not None else 0
        stored = StoredUpdate(path, kept.pieces, kept.magnitudes, data=data)
        self._held[kept.digest] = Held(stored, Meta(kept.magnitudes, kept.squared_norms, kept.steps))

    # ------------------------------------------------------------ out

    def rows(self, digests: Sequence[Digest]) -> list[Row]:
        """These updates in their order."""
        return [self._rows[digest] for digest in digests]

    def metas(self, digests: Collection[Digest]) -> dict[Digest, Meta]:
        """What is known of these."""
        return {digest: self._held[digest].meta for digest in digests}

    def weighted(self, plan: FoldPlan) -> list[Weighted]:
        """A fold's updates, in its order."""
        return [
            Weighted(self._held[planned.digest].stored, planned.weight, planned.factor, planned.trained_factor)
            for planned in plan.updates
        ]

    def arrays(self, digest: Digest) -> Arrays:
        """The values of an update, decoded."""
        if digest in self._rows:
            return self._views(self._rows[digest].values.copy())
        stored = self._held[digest].stored
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
        """Let an update be another one, plain."""
        steps = self._rows[digest].steps if digest in self._rows else self._held[digest].meta.steps
        self._forget(digest)
        self.add(digest, update, dict(zip(("normalizer", "effective_steps"), steps, strict=True)))

    def keep_only(self, digests: Collection[Digest]) -> None:
        """Forget all others."""
        for digest in (self._held.keys() | self._rows.keys()) - set(digests):
            self._forget(digest)

    def _forget(self, digest: Digest) -> None:
        if self._rows.pop(digest, None) is not None:
            return
        stored = self._held.pop(digest).stored
        if stored.data is not None:
            self._in_memory -= len(stored.data)
        elif stored.path.name not in self._written[0] | self._written[1]:
            stored.path.unlink(missing_ok=True)


def _steps_of(report: Report) -> tuple[float, float]:
    return report.get("normalizer", 1.0), report.get("effective_steps", 1.0)

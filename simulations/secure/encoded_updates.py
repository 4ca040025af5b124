"""The encoded updates of a simulated run, and the streams that mask them.

An update is encoded once, when its training has ended, and masked when it is folded: until then only its words and the
keys of its streams are kept, as the masked words follow from these.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from atoll.protocol.vocabulary import Digest
from atoll.task.arrays import Arrays
from atoll.tensors.layout import FLOATS, Layout, Piece, Tensor, in_order
from atoll.tensors.masked.encode import encoded_blocks
from atoll.tensors.masked.mask import mask_update
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.secure.keystream import Stream
from atoll.tensors.secure.masked_layout import in_positions
from atoll.tensors.secure.plan import Encoding, EncodingPlan, Vector
from atoll.tensors.secure.vector import WEIGHT_BITS, WORD_DTYPE, decode
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader, stored_model

IN_MEMORY_MAX = 1 << 30
"""Maximum number of bytes of encoded updates in memory; further ones are files."""


@dataclass(frozen=True, slots=True)
class Meta:
    """Metadata of a masked update for the plan of a fold: it says nothing about the update."""

    magnitudes: dict[str, float | int] = field(default_factory=dict)
    squared_norms: dict[str, float] = field(default_factory=dict)
    steps: tuple[float, float] = (1.0, 1.0)
    rank: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Entry:
    """Encoded update."""

    layout: Layout
    """Tensors of the masked update, in canonical order."""
    path: Path
    """Its file, if `data` is None."""
    data: bytes | None = field(repr=False)
    streams: tuple[Stream, ...] = field(default=(), repr=False)
    share: GridNoise | None = None
    origin: "_Origin | None" = None
    """What it was made of, if it may be forged."""


class _Origin(NamedTuple):
    """What an encoded update was made of."""

    update: Arrays
    layout: Layout
    plan: EncodingPlan
    rounding: bytes


class _Unbounded(EncodingPlan):
    """Encoding of a client that ignores the bound: nothing is clipped, and words are as large as a word holds."""

    @property
    def most(self) -> int:
        """The largest magnitude of a word that float64 holds, too."""
        return min((1 << self.bits - 1) - 1, (1 << 63) - 1024)

    def factor(self, weight: int, norm: float, num_values: int) -> float:
        """Return the factor of an update's floats: its weight."""
        return math.ldexp(weight, -WEIGHT_BITS)


class EncodedUpdates:
    """Encoded updates that a session or a fold may still need.

    Args:
        folder: for the updates that do not fit into memory, and for masked ones.
        may_forge: whether `forge` may replace updates, which are then kept in memory until they are folded.
    """

    def __init__(self, folder: Path, *, may_forge: bool = False) -> None:
        self._folder, self._may_forge = folder, may_forge
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        self._entries: dict[Digest, _Entry] = {}
        self._in_memory = 0

    def add(self, digest: Digest, update: Arrays, layout: Layout, plan: EncodingPlan, rounding: bytes) -> int:
        """Encode an update, and store it; return the size of its masked form [bytes].

        Args:
            digest: a name of the encoded update.
            update: its tensors.
            layout: of the base version's tensors that travel.
            plan: of its client.
            rounding: key of the numbers that round its values up or down.

        Raises:
            NotFinite: a value is NaN or infinite.
        """
        data = _words(update, layout, plan, rounding)
        masked, path = in_order(Vector(layout, plan).masked), self._folder / digest
        copied = {name: array.copy() for name, array in update.items()} if self._may_forge else {}
        origin = _Origin(copied, layout, plan, rounding) if self._may_forge else None
        if self._in_memory + len(data) > IN_MEMORY_MAX:
            path.write_bytes(data)
            self._entries[digest] = _Entry(masked, path, None, origin=origin)
        else:
            self._in_memory += len(data)
            self._entries[digest] = _Entry(masked, path, data, origin=origin)
        return len(data)

    def plain(self, digest: Digest) -> Arrays:
        """Return an update as it was before its encoding; `may_forge` has kept it."""
        origin = self._entries[digest].origin
        assert origin is not None
        return origin.update

    def forge(self, digest: Digest, update: Arrays, *, keeps_bound: bool) -> None:
        """Replace a masked update by that of a malicious client, under the same masks.

        Args:
            digest: of the masked update.
            update: the tensors that the client adds in place of its update.
            keeps_bound: whether it clips them as honest clients do.
        """
        entry = self._entries[digest]
        assert entry.origin is not None
        _, layout, plan, rounding = entry.origin
        if not keeps_bound:
            plan = _Unbounded(**{each.name: getattr(plan, each.name) for each in fields(plan)})
        path = self._folder / f"{digest}.forged"
        self._entries[digest] = replace(entry, path=path, data=_words(update, layout, plan, rounding))

    def mask(self, encoded: Digest, attempt: int, streams: Sequence[Stream], share: GridNoise | None = None) -> Digest:
        """Mask an encoded update with the streams of a session's attempt; return a name of the masked update.

        Args:
            encoded: the name of the encoded update.
            attempt: at its session's sum.
            streams: with their signs; without masks none.
            share: of its client in the noise of the sum; None: it adds none.
        """
        digest = Digest(hashlib.sha256(f"{encoded} {attempt}".encode()).hexdigest())
        self._entries[digest] = replace(self._entries[encoded], streams=tuple(streams), share=share)
        return digest

    def stored(self, digest: Digest) -> StoredUpdate:
        """Return a masked update; without streams and noise it is the encoded one."""
        entry = self._entries[digest]
        pieces = tuple(Piece(t.name, t.dtype, (0,) * len(t.shape), t.shape, "") for t in entry.layout)
        if not entry.streams and entry.share is None:
            return StoredUpdate(entry.path, pieces, data=entry.data)
        if entry.data is not None:
            entry.path.write_bytes(entry.data)
        out = self._folder / f"{digest}.masked"
        mask_update(entry.path, out, in_positions(entry.layout), entry.streams, start=0, share=entry.share)
        return stored_model(out)

    def seen(self, digest: Digest, encoding: Encoding, layout: Layout) -> Arrays:
        """Return what a coordinator reads of a masked update alone: the words of its floats as numbers.

        Args:
            digest: of the masked update.
            encoding: of its sum.
            layout: of the base version's tensors that travel.
        """
        ranges, dtype = Vector(layout, encoding).ranges, WORD_DTYPE[encoding.bits]
        found = {}
        with UpdateReader(self.stored(digest)) as reader:
            for tensor in self._entries[digest].layout:
                if tensor.name in ranges:
                    words = reader.read(tensor, 0, tensor.num_elements).astype(dtype)
                    found[tensor.name] = decode(words, encoding.bits, ranges[tensor.name]).reshape(tensor.shape)
        return found

    def keep_only(self, digests: Collection[Digest]) -> None:
        """Drop all other updates."""
        for digest in self._entries.keys() - set(digests):
            del self._entries[digest]
        kept = {entry.path: entry for entry in self._entries.values()}
        self._in_memory = sum(len(entry.data) for entry in kept.values() if entry.data is not None)
        for path in self._folder.iterdir():
            if path not in kept or kept[path].data is not None:
                path.unlink()


def _words(update: Arrays, layout: Layout, plan: EncodingPlan, rounding: bytes) -> bytes:
    """Return the words of an update, in canonical order."""
    flat = {tensor.name: _flat(update[tensor.name], tensor) for tensor in layout}
    vector = Vector(layout, plan)
    found = encoded_blocks(lambda tensor, start, stop: flat[tensor.name][start:stop], vector, plan, rounding)
    return b"".join(words.tobytes() for words in found.blocks)


def _flat(array: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Return the values of a tensor of an update, side by side, as a reader of its file has them."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.astype(np.float32, copy=False) if tensor.dtype in FLOATS else flat

"""The opened sums of a round's sessions: the sum of masked words, less the streams that still mask it.

    sum_k x_k = sum_k y_k - streams                        y_k: words modulo 2^bits of the updates in the sum

Words add exactly in any order. So a rank sums its updates' words over all parts of the model, sends each owner its
share, takes the streams off the part that it owns, and keeps the words of that part in a file without a name; ranks,
tiles and threads change no bit. `secure/exact` is small: all ranks have its sum.

A sum is what its members may have made, or its session is dropped alone: the canaries and the count are the number of
its members, the weight is at most as large, and the norm of the floats is at most the clip's bound,

    ||sum_k a_k u_k|| <= C sum_k a_k (1 + 1e-6) + rounding

where `rounding` bounds the norm of the differences between values and steps, with more than eight standard deviations.
In a private sum the norm is that of the sum with its noise, and the bound has that, too: without it a member could add
a vector at the edge of the bound, and learn from a dropped sum what the others have added. So members' noise is in the
words of each session; and where the coordinator adds one noise to all sessions together, no single one is judged here,
but their sum with the noise, as it is published (`fold`).
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.exchange import NOTHING, Bytes, Exchange, from_all, swapped
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.streaming import opened_readers
from atoll.aggregation.ordered_map import computed_ahead
from atoll.ground.printable import count_of
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.pieces import first_element
from atoll.tensors.safetensors_file import read_into
from atoll.tensors.secure.exact import ExactSum, WrongSum, decode_exact
from atoll.tensors.secure.keystream import Stream, Streams, Words
from atoll.tensors.secure.masked_layout import EXACT
from atoll.tensors.secure.plan import Vector
from atoll.tensors.secure.vector import WEIGHT_BITS, WORD_DTYPE, decode, step_of
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader

TILE_WORDS = 1 << 18
"""Number of words of every rank's part that are summed and opened at once."""
EXCESS = 1e-6
"""Part by which the norm of a sum may be longer than its members may make it, for rounding in float64."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session of which the sum is opened."""

    number: int
    members: int
    """Number of members whose updates are in the sum, at all ranks."""
    updates: tuple[StoredUpdate, ...]
    """Their masked updates, or the parts of them, that are at this rank."""
    streams: tuple[Stream, ...] = field(repr=False)
    """To take off the sum, with their signs: secrets."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Some elements of a float tensor, in flat order."""

    tensor: Tensor
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


Tile = tuple[Segment, ...]
"""Segments that follow each other, and are summed and opened at once: many tensors are small."""


class OpenedSum:
    """The opened sum of a session, of the elements that this rank owns.

    Args:
        number: of the session.
        exact: what it adds exactly.
        vector: of the sum.
        segments: that this rank owns, in the order of the file.
        file: their words.
    """

    def __init__(
        self, number: int, exact: ExactSum, vector: Vector, segments: Sequence[Segment], file: IO[bytes]
    ) -> None:
        self.number, self.exact, self._vector, self._file = number, exact, vector, file
        self._dtype = np.dtype(f"i{vector.encoding.bits // 8}")
        self._places: dict[str, tuple[int, int]] = {}  # the first element that is here, and its position [words]
        position = 0
        for segment in segments:
            self._places.setdefault(segment.tensor.name, (segment.start, position))
            position += segment.size

    @property
    def weight(self) -> float:
        """The sum of the weights a."""
        return weight_in(self.exact.weight)

    def words(self, tensor: Tensor, start: int, stop: int) -> NDArray[Any]:
        """Return the signed words of elements of a float tensor that this rank owns."""
        first, position = self._places[tensor.name]
        words = np.empty(stop - start, self._dtype)
        at = (position + start - first) * words.itemsize
        read_into(words, self._file.fileno(), at, path=Path(f"the sum of session {self.number}"))
        return words

    def carries(self, tensor: str) -> bool:
        """Return whether elements of a float tensor are here."""
        return tensor in self._places

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the mean of the session, as an update: see `sources.Source.read`."""
        mean = self.words(tensor, start, stop).astype(np.float64)
        np.multiply(mean, step_of(self._vector.encoding.bits, self._vector.ranges[tensor.name]), out=mean)
        np.divide(mean, self.weight, out=mean)
        block = np.empty(stop - start, np.float32) if out is None else out
        block[:] = mean
        return block


def weight_in(steps: int) -> float:
    """Return a sum of weights, rounded once."""
    return steps / (1 << WEIGHT_BITS)


@dataclass(frozen=True, slots=True)
class Opened:
    """The sums of a round's sessions.

    Attributes:
        sums: those that count, in the order of the sessions.
        dropped: the others, by number, each with the reason.
    """

    sums: tuple[OpenedSum, ...]
    dropped: Mapping[int, str]


def open_sums(
    vector: Vector,
    sessions: Sequence[Session],
    parts: Sequence[Sequence[Piece]],
    *,
    exchange: Exchange,
    folder: Path,
    stack: ExitStack,
    execution: Execution,
    are_judged: bool = True,
) -> Opened:
    """Open the sums of sessions, together with all other ranks.

    Args:
        vector: of the sums.
        sessions: in order, the same at each rank but for their updates.
        parts: the pieces of the base version that each rank owns, in canonical order.
        exchange: with the other ranks.
        folder: where the files of the sums lie; they have no names.
        stack: until which the files stay open.
        execution: threads of this rank.
        are_judged: drop each sum whose norm is too large; else the noise of all of them is added later.

    Raises:
        ExchangeBroken: another rank is gone or has failed.
        ValueError: an update has other tensors than the vector.
        TensorFileCorrupted: an update's file is damaged.
        OSError: a file cannot be read or written.
    """
    for session in sessions:
        _check_updates(vector, session)
    tensors = {tensor.name: tensor for tensor in vector.masked if tensor.name != EXACT}
    segments = [[*_segments(tensors, pieces)] for pieces in parts]
    sums, dropped = [], {}
    for session in sessions:
        with ExitStack() as readers:
            words = _SessionWords(vector, session, opened_readers(session.updates, readers))
            try:
                exact = words.exact(exchange)
            except WrongSum as fault:
                dropped[session.number] = str(fault)
                continue
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
            norm = words.opened(segments, exchange, file, execution)
        bound = bound_of(vector, exact.members, exact.weight, vector.encoding.share * math.sqrt(exact.members))
        if are_judged and norm > bound:
            dropped[session.number] = f"its norm is {norm:.4g}; allowed of its weight: {bound:.4g}"
            file.close()
            continue
        sums.append(OpenedSum(session.number, exact, vector, segments[exchange.rank], file))
    return Opened(tuple(sums), dropped)


def bound_of(vector: Vector, members: int, weight: int, deviation: float) -> float:
    """Return the largest norm of a sum.

    Args:
        vector: of the sum.
        members: number of its members.
        weight: the sum of their weights [steps].
        deviation: standard deviation of the noise in it [steps].
    """
    encoding = vector.encoding
    squares = 0.0
    for tensor in vector.floats:
        step, count = step_of(encoding.bits, vector.ranges[tensor.name]), tensor.num_elements
        most = members * math.sqrt(count)  # each value is less than a step from its word
        usual = 0.5 * math.sqrt(members * count) + 4.0 * math.sqrt(members)
        squares += (step * min(most, usual)) ** 2
    noise = 0.0
    if deviation:  # the norm of d normal numbers is at most sqrt(d) + 8, but for a chance of e^-32
        step = step_of(encoding.bits, encoding.ranges[0])
        noise = step * deviation * (math.sqrt(vector.num_values) + 8.0)
    return encoding.clip_norm * weight_in(weight) * (1.0 + EXCESS) + math.sqrt(squares) + noise


class _SessionWords:
    """The words of one session at this rank."""

    def __init__(self, vector: Vector, session: Session, readers: Sequence[UpdateReader]) -> None:
        self._vector, self._session, self._readers = vector, session, readers
        self._bits = vector.encoding.bits

    def exact(self, exchange: Exchange) -> ExactSum:
        """Return what the session adds exactly; all ranks return the same.

        Raises:
            WrongSum: it is no sum of the session's members.
            ExchangeBroken: another rank is gone.
        """
        tensor = next(tensor for tensor in self._vector.masked if tensor.name == EXACT)
        total = np.zeros(tensor.num_elements, np.uint64)
        for part in from_all(exchange, self._share((Segment(tensor, 0, tensor.num_elements),), 64)):
            if part.size:
                total += part.view(np.uint64)
        Streams(self._session.streams).add(total, self._vector.starts[EXACT])
        return decode_exact(total, self._vector.exact, self._session.members)

    def opened(
        self, segments: Sequence[Sequence[Segment]], exchange: Exchange, file: IO[bytes], execution: Execution
    ) -> float:
        """Write the words that this rank owns, without streams, and return the norm of the whole sum."""
        tiles = [[*_tiles(of_rank, execution.tile_elements or TILE_WORDS)] for of_rank in segments]
        share = partial(self._share, bits=self._bits)
        squares = []
        with (
            closing(swapped(tiles, share, exchange, threads=execution.threads)) as ready,
            closing(
                computed_ahead(
                    ((None, partial(self._open, tile, shares)) for tile, shares in ready), threads=execution.threads
                )
            ) as finished,
        ):
            for _, (words, squared) in finished:
                if execution.between is not None:
                    execution.between()
                file.write(words.data)
                squares.append(squared)
        file.flush()
        everywhere = from_all(exchange, np.array([math.fsum(squares)]))
        return math.sqrt(math.fsum(float(part.view(np.float64)[0]) for part in everywhere))

    def _share(self, tile: Tile, bits: int) -> Words:
        """Return the sum of the updates here, in its form on the wire; empty if none has any of the elements."""
        dtype, is_here = WORD_DTYPE[bits], False
        total: NDArray[Any] = np.zeros(sum(segment.size for segment in tile), dtype)
        room = np.empty(max(segment.size for segment in tile), f"i{bits // 8}")
        for reader in self._readers:
            at = 0
            for segment in tile:
                if reader.meets(segment.tensor, segment.start, segment.stop):
                    block = reader.read(segment.tensor, segment.start, segment.stop, room[: segment.size])
                    total[at : at + segment.size] += block.view(dtype)
                    is_here = True
                at += segment.size
        return total if is_here else NOTHING.view(dtype)

    def _open(self, tile: Tile, shares: Sequence[Bytes]) -> tuple[Words, float]:
        """Return the words of a tile without streams, and the square of their norm."""
        dtype = WORD_DTYPE[self._bits]
        total: NDArray[Any] = np.zeros(sum(segment.size for segment in tile), dtype)
        for part in shares:
            if part.size:
                total += part.view(dtype)
        streams, at, squared = Streams(self._session.streams), 0, []
        for segment in tile:
            words = total[at : at + segment.size]
            streams.add(words, self._vector.starts[segment.tensor.name] + segment.start)
            values = decode(words, self._bits, self._vector.ranges[segment.tensor.name])
            squared.append(float(np.square(values, out=values).sum()))  # by no threads of a library
            at += segment.size
        return total, math.fsum(squared)


def _segments(tensors: Mapping[str, Tensor], pieces: Sequence[Piece]) -> Iterator[Segment]:
    """Yield the segments of a rank's pieces of float tensors, one for each tensor."""
    last: Segment | None = None
    for piece in pieces:
        if (tensor := tensors.get(piece.tensor)) is None or not piece.num_elements:
            continue
        start = first_element(piece, tensor)
        stop = start + piece.num_elements
        if last is not None and last.tensor is tensor and last.stop == start:
            last = Segment(tensor, last.start, stop)
            continue
        if last is not None:
            yield last
        last = Segment(tensor, start, stop)
    if last is not None:
        yield last


def _tiles(segments: Sequence[Segment], most: int) -> Iterator[Tile]:
    """Yield tiles of at most `most` words."""
    tile: list[Segment] = []
    left = most
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            stop = min(segment.stop, start + left)
            tile.append(Segment(segment.tensor, start, stop))
            left -= stop - start
            start = stop
            if not left:
                yield tuple(tile)
                tile, left = [], most
    if tile:
        yield tuple(tile)


def _check_updates(vector: Vector, session: Session) -> None:
    tensors = {tensor.name: tensor for tensor in vector.masked}
    for update in session.updates:
        for piece in update.pieces:
            tensor = tensors.get(piece.tensor)
            if tensor is None or piece.dtype != tensor.dtype or piece.codec:
                kind = "no such tensor" if tensor is None else tensor.dtype
                raise ValueError(f"update {update.path}: {piece.dtype} {piece.tensor!r}, the sum has {kind}")
        if not update.is_partial and {piece.tensor for piece in update.pieces} != set(tensors):
            raise ValueError(
                f"update {update.path}: it has not all of the {count_of(len(tensors), 'tensor')} of the sum"
            )

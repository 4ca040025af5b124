"""The masking of an encoded update into the spool: a file by this process, parts by the ranks of its crew.

    encoded entry  -->  + share of noise, + key streams  -->  masked entry of the same boxes, an ordinary update of one
                                                              example

Ranks mask if they are at rest. If they train for another run, are lost, or the site is no mesh any more, this process
masks the parts: the bytes are the same.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.client.disk.spool import Entry
from atoll.client.disk.stores import Stores
from atoll.client.work.runner import MaskOrder, PartToMask, Runner
from atoll.ground.durable import remove
from atoll.protocol.manifest import UpdateManifest, parse_update
from atoll.protocol.part_manifest import PartManifest, part_of
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import Digest
from atoll.tensors.layout import Layout, Piece, Tensor
from atoll.tensors.masked.mask import mask_part, mask_update
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.pieces import layout_of_pieces, part_name
from atoll.tensors.secure.keystream import Stream
from atoll.tensors.secure.masked_layout import in_positions

Pieces = tuple[Piece, ...]


class Masking:
    """Masking of one encoded update at a time; its files lie in the agent's folder of work until they are spooled.

    Args:
        stores: the agent's state on disk.
        runner: of the ranks that mask parts.
    """

    def __init__(self, stores: Stores, runner: Runner) -> None:
        self._spool, self._work, self._runner = stores.spool, stores.work, runner

    async def spooled(
        self, task: str, entry: Entry, attempt: int, streams: Sequence[Stream], share: GridNoise | None = None
    ) -> Digest:
        """Mask an encoded update into the spool; return the digest of what is sent.

        Args:
            task: of the update.
            entry: the encoded update.
            attempt: at its sum, which the masked update names.
            streams: of the session, with their signs.
            share: of this member in the noise of the sum, for this attempt alone; None: it adds none.

        Raises:
            TensorFileCorrupted: the encoded update is damaged.
            OSError: a file cannot be read or written.
        """
        for left in self._work.glob("masked.*"):  # by an attempt that was given up
            remove(left)
        # A name of its own: ranks of a crew that this agent has lost may still write to the last one.
        out = self._work / f"masked.{secrets.token_hex(8)}"
        try:
            if not entry.parts:
                return await on_thread(None, self._whole, entry, attempt, out, streams, share)
            order = await on_thread(None, _order_of, task, entry, out, tuple(streams), share)
            pieces = await self._runner.mask(order)
            if pieces is None:
                pieces = await on_thread(None, _masked_here, order)
            return await on_thread(None, self._in_parts, entry, attempt, out, pieces)
        finally:
            remove(out)

    def _whole(
        self, entry: Entry, attempt: int, out: Path, streams: Sequence[Stream], share: GridNoise | None
    ) -> Digest:
        encoded = parse_update(entry.manifest)
        layout = in_positions(layout_of_pieces(encoded.pieces))
        pieces = mask_update(entry.path, out, layout, streams, start=entry.data_start, share=share)
        return self._add(out, replace(encoded, pieces=tuple(pieces), attempt=attempt), entry)

    def _in_parts(self, entry: Entry, attempt: int, out: Path, pieces: Sequence[Pieces]) -> Digest:
        parts = [PartManifest(index, of_part) for index, of_part in enumerate(pieces)]
        listed = tuple(part.listed for part in parts)
        masked = replace(parse_update(entry.manifest), parts=listed, attempt=attempt)
        return self._add(out, masked, entry, parts)

    def _add(self, out: Path, masked: UpdateManifest, entry: Entry, parts: Sequence[PartManifest] = ()) -> Digest:
        added = self._spool.add(out, masked, statistics={}, rank=entry.rank, spreads=entry.spreads, parts=parts)
        return added.digest


def layout_of_boxes(pieces: Iterable[Piece]) -> Layout:
    """Return the tensors that the boxes of all parts cover, in no order."""
    found: dict[str, Tensor] = {}
    for piece in pieces:
        ends = tuple(o + n for o, n in zip(piece.offsets, piece.lengths, strict=True))
        before = found[piece.tensor].shape if piece.tensor in found else ends
        found[piece.tensor] = Tensor(piece.tensor, piece.dtype, tuple(map(max, before, ends)))
    return tuple(found.values())


def _order_of(task: str, entry: Entry, out: Path, streams: tuple[Stream, ...], share: GridNoise | None) -> MaskOrder:
    root, parts = parse_update(entry.manifest), []
    out.mkdir()
    for index, part in enumerate(entry.parts):
        manifest = part_of(root, part.manifest)
        assert manifest is not None, "an entry in parts has the manifest of each"
        parts.append(PartToMask(part.path, out / part_name(index), manifest.pieces))
    layout = in_positions(layout_of_boxes(piece for part in parts for piece in part.pieces))
    return MaskOrder(task=task, layout=layout, parts=tuple(parts), streams=streams, share=share)


def _masked_here(order: MaskOrder) -> tuple[Pieces, ...]:
    return tuple(
        tuple(mask_part(part.encoded, part.out, order.layout, part.pieces, order.streams, order.share))
        for part in order.parts
    )

"""The masking of an encoded update into the spool: by the ranks if they are at rest, else by this process."""

import asyncio
import hashlib

import numpy as np
import pytest

from atoll.client.disk.spool import Costs, Spool
from atoll.client.wire.upload import _opened
from atoll.client.work.masking import Masking
from atoll.protocol.disclosure import Disclosure, MetricsLeave
from atoll.protocol.manifest import UpdateManifest, parse_update
from atoll.protocol.part_manifest import PartManifest, parse_part
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.masked.mask import mask_part
from atoll.tensors.pieces import part_name
from atoll.tensors.safetensors_file import TensorFileCorrupted, write
from atoll.tensors.secure.keystream import Streams

STREAMS = [(bytes([7]) * 32, 1), (bytes([9]) * 32, -1)]
WORDS = {"secure/exact": np.arange(5, dtype=np.int64), "w": np.arange(12, dtype=np.int32).reshape(3, 4)}
LAYOUT = (Tensor("w", "I32", (3, 4)), Tensor("secure/exact", "I64", (5,)))
COLUMNS = [("secure/exact", (0,), (5,)), ("w", (0, 0), (3, 2))], [("w", (0, 2), (3, 2))]


class Stores:
    def __init__(self, folder):
        self.work = folder / "work"
        for name in ("spool", "encoded", "work"):
            (folder / name).mkdir()
        self.spool, self.encoded = Spool(folder / "spool", 10**6), Spool(folder / "encoded", 10**6)


class Ranks:
    """The runner of a crew that masks, or does not."""

    def __init__(self, masks):
        self.masks, self.orders = masks, []

    async def mask(self, order):
        self.orders.append(order)
        if not self.masks:
            return None
        found = [mask_part(part.encoded, part.out, order.layout, part.pieces, order.streams) for part in order.parts]
        return tuple(map(tuple, found))


def manifest_of(pieces=(), parts=()):
    listed = tuple(part.listed for part in parts)
    return UpdateManifest("run-1", 1, "c", 0, "0" * 64, 1, 1.0, tuple(pieces), parts=listed)


def spooled_parts(stores, boxes=COLUMNS):
    """Put an encoded update in parts into its spool."""
    folder, parts = stores.work / "parts", []
    folder.mkdir()
    for index, mine in enumerate(boxes):
        pieces, raw = [], b""
        for name, offsets, lengths in mine:
            box = WORDS[name][tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
            data = np.ascontiguousarray(box).tobytes()
            dtype = {"int32": "I32", "int64": "I64"}[box.dtype.name]
            pieces.append(Piece(name, dtype, offsets, lengths, hashlib.sha256(data).hexdigest()))
            raw += data
        (folder / part_name(index)).write_bytes(raw)
        parts.append(PartManifest(index, tuple(pieces)))
    return stores.encoded.add(folder, manifest_of(parts=parts), statistics={}, rank=1, spreads=True, parts=parts)


def masked(stores, entry, ranks):
    digest = asyncio.run(Masking(stores, ranks).spooled("task", entry, 2, STREAMS))
    found = stores.spool["round", "run-1", 1]
    assert found.digest == digest
    return found


def expected():
    """The whole masked tensors, by the streams alone."""
    found, start = {}, 0
    for tensor in LAYOUT:
        words = WORDS[tensor.name].copy()
        Streams(STREAMS).add(words.reshape(-1).view(f"u{words.itemsize}"), start)
        found[tensor.name], start = words, start + 12
    return found


@pytest.mark.parametrize("masks", [True, False])
def test_parts_are_masked_by_the_ranks_or_here_to_the_same_bytes(tmp_path, masks):
    stores, ranks = Stores(tmp_path), Ranks(masks)
    entry = spooled_parts(stores)
    (stores.work / "masked.left").mkdir()  # by an agent that was killed
    found = masked(stores, entry, ranks)
    assert [order.layout for order in ranks.orders] == [LAYOUT]
    assert (found.rank, found.spreads, found.statistics, len(found.parts)) == (1, True, {}, 2)
    root, whole = parse_update(found.manifest), expected()
    assert (root.num_examples, root.work, root.client_id, root.attempt) == (1, 1.0, "c", 2)
    for part, boxes in zip(found.parts, COLUMNS, strict=True):
        pieces, raw, position = parse_part(part.manifest).pieces, part.path.read_bytes(), 0
        assert [(p.tensor, p.offsets, p.lengths) for p in pieces] == boxes
        for piece in pieces:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))
            data = raw[position : position + piece.num_bytes]
            assert data == np.ascontiguousarray(whole[piece.tensor][box]).tobytes()
            assert hashlib.sha256(data).hexdigest() == piece.sha256
            position += piece.num_bytes
    assert list(stores.work.iterdir()) == []
    assert entry.digest != found.digest


def test_an_order_does_not_show_its_keys(tmp_path):
    stores, ranks = Stores(tmp_path), Ranks(True)
    masked(stores, spooled_parts(stores), ranks)
    assert ranks.orders[0].streams == tuple(STREAMS)
    assert STREAMS[0][0].hex() not in repr(ranks.orders[0])
    assert str(STREAMS[0][0]) not in repr(ranks.orders[0])


def test_a_file_is_masked_here(tmp_path):
    stores, ranks = Stores(tmp_path), Ranks(True)
    pieces = write(stores.work / "encoded", WORDS, durable=False)
    entry = stores.encoded.add(stores.work / "encoded", manifest_of(pieces), statistics={})
    found = masked(stores, entry, ranks)
    assert ranks.orders == []
    with found.path.open("rb") as file:
        file.seek(found.data_start)
        raw = file.read(found.num_bytes)
    sent = parse_update(found.manifest)
    assert raw == b"".join(expected()[piece.tensor].tobytes() for piece in sent.pieces)
    assert sent.attempt == 2


def test_the_upload_of_a_masked_update_tells_nothing_of_its_training(tmp_path):
    """Neither examples, work, statistics, seconds, steps nor devices, whatever the policy lets leave of plain ones."""
    stores = Stores(tmp_path)
    pieces = write(stores.work / "encoded", WORDS, durable=False)
    costs = Costs(download_seconds=1.0, train_seconds=2.0, steps=7, mesh=MeshUse(num_ranks=2))
    training = {"statistics": {"loss": (1.0, 2.0)}, "costs": costs}
    encoded = stores.encoded.add(stores.work / "encoded", manifest_of(pieces), **training)

    def told(entry):
        return {field.name for field, _ in _opened(entry, Disclosure(MetricsLeave.PER_SITE), None).ListFields()}

    assert told(encoded) >= {"statistics", "download_seconds", "train_seconds", "steps", "mesh"}
    assert told(masked(stores, encoded, Ranks(True))) <= {"manifest", "metrics", "min_sites"}


def test_a_damaged_part_is_not_spooled(tmp_path):
    stores = Stores(tmp_path)
    entry = spooled_parts(stores)
    entry.parts[1].path.write_bytes(bytes(entry.parts[1].num_bytes))
    with pytest.raises(TensorFileCorrupted, match="is not as it was encoded"):
        masked(stores, entry, Ranks(False))
    assert stores.spool.entries() == {}
    assert list(stores.work.iterdir()) == []

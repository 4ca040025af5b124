"""Stored updates whose pieces are encoded, written by hand: the product's own writer has no part in it."""

import hashlib
from dataclasses import replace

import numpy as np

from atoll.tensors.codecs.chunks import decode_range, encode_chunks
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import Piece, pieces_in_order
from atoll.tensors.updates.reader import StoredUpdate
from tests.aggregation.models import DTYPES

NAMES = ("bf16", "fp16", "qsgd8", "sign", "topk:0.05")


def encoded(name, values, seed=0):
    """All chunks of an array."""
    flat = np.ascontiguousarray(values).reshape(-1)
    rng = np.random.default_rng(seed)
    return b"".join(encode_chunks(parse_codec(name), flat.size, lambda a, b: flat[a:b], rng))


def decoded(name, data, num_elements):
    return decode_range(parse_codec(name), num_elements, 0, num_elements, lambda at, n: data[at : at + n])


def store_encoded(path, arrays, codecs, *, cuts=None, junk=b"", spoil=lambda data: data):
    """Write an update of which the tensors in `codecs` are encoded, box by box.

    Returns:
        The stored update without magnitudes, and each tensor as it decodes.
    """
    boxes, values = [], {name: array.copy() for name, array in arrays.items()}
    for name, array in arrays.items():
        for offsets, lengths in (cuts or {}).get(name, [((0,) * array.ndim, array.shape)]):
            index = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            piece, raw = Piece(name, DTYPES[array.dtype.str], offsets, lengths, ""), array[index].tobytes()
            if codec := codecs.get(name):
                raw = encoded(codec, array[index], seed=len(boxes))
                piece = replace(piece, codec=codec, encoded_bytes=len(raw))
                values[name][index] = decoded(codec, raw, array[index].size).reshape(lengths)
                raw = spoil(raw)
            boxes.append((replace(piece, sha256=hashlib.sha256(raw).hexdigest()), raw))
    pieces = pieces_in_order(piece for piece, _ in boxes)
    raws = dict(boxes)
    path.write_bytes(junk + b"".join(raws[piece] for piece in pieces))
    return StoredUpdate(path, pieces, {}, data_start=len(junk)), values

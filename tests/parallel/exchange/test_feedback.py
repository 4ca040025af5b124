"""Residuals by boxes: nothing is lost, whatever the number of ranks, and one rank has the bytes of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.parallel.exchange.feedback import BoxFeedback, make_residual
from atoll.parallel.exchange.shares import Share
from atoll.parallel.exchange.write import Encoding, write_part
from atoll.tensors import safetensors_file
from atoll.tensors.codecs.chunks import decode_range
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.safetensors_file import read_metadata
from atoll.tensors.updates.encoded_writer import REPLACES, Feedback, write_encoded

Arrays = dict[str, NDArray[Any]]

SHAPES = {"large": (40, 5000), "small": (8, 3), "bias": (1,), "mean": (16,)}
"""`large` has several chunks on each rank; a box of one element stays plain; `mean` is a buffer."""

PLAIN, CODEC = ("mean",), "topk:0.010000"


def values(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def shares_of(arrays: Arrays, rank: int, ranks: int) -> list[Share]:
    """Rows of each tensor, and the whole of a tensor with fewer rows on the first rank."""
    found = []
    for name, array in arrays.items():
        rows = np.array_split(np.arange(len(array)), ranks if len(array) >= ranks else 1)
        if rank < len(rows):
            mine = rows[rank]
            local = torch.from_numpy(array[mine[0] : mine[-1] + 1].copy())
            offsets = (int(mine[0]), *(0 for _ in array.shape[1:]))
            found.append(Share(name, array.shape, offsets, tuple(local.shape), local, 1, 0))
    return sorted(found, key=lambda share: share.name)


def sent(folder: Path, after: Arrays, ranks: int, owed: list[Path], out: Path) -> Arrays:
    """Write all parts; return what the coordinator decodes."""
    tensors = [Tensor(name, "F32", shape) for name, shape in SHAPES.items() if name not in PLAIN]
    make_residual(out, tensors, owed)
    found = {name: np.full(shape, np.nan, np.float32) for name, shape in SHAPES.items()}
    for rank in range(ranks):
        mine = shares_of(after, rank, ranks)
        with BoxFeedback(owed, out, [share.piece for share in mine if share.name not in PLAIN]) as feedback:
            pieces = write_part(
                mine, folder / "version", folder / f"part.{rank}", Encoding(CODEC, 1, rank, PLAIN, feedback)
            )
        data = (folder / f"part.{rank}").read_bytes()
        for piece in pieces:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))
            found[piece.tensor][box] = decoded(piece, data[: piece.num_bytes]).reshape(piece.lengths)
            data = data[piece.num_bytes :]
    return found


def decoded(piece: Piece, raw: bytes) -> NDArray[Any]:
    if not piece.codec:
        return np.frombuffer(raw, np.float32)
    size = piece.num_elements
    return decode_range(parse_codec(piece.codec), size, 0, size, lambda at, count: raw[at : at + count])


def test_nothing_is_lost_when_four_ranks_become_two(tmp_path: Path) -> None:
    version = values(1)
    safetensors_file.write(tmp_path / "version", version, durable=False)
    owed: list[Path] = []
    before = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for number, ranks in enumerate((4, 2, 3)):
        after, out = values(10 + number), tmp_path / f"residual.{number}"
        found = sent(tmp_path, after, ranks, owed, out)
        residual = safetensors_file.read(out)
        assert np.any(residual["large"])
        assert not np.any(residual["bias"])
        assert residual.keys() == SHAPES.keys() - set(PLAIN)
        for name in SHAPES:
            wanted = (after[name] - version[name]) + before[name]
            np.testing.assert_allclose(found[name] + residual.get(name, 0), wanted, rtol=1e-6, atol=1e-6)
        assert read_metadata(out)[REPLACES] == (f'["residual.{number - 1}"]' if number else "[]")
        owed, before = [out], {**before, **residual}


def test_one_rank_has_the_bytes_and_the_residual_of_one_process(tmp_path: Path) -> None:
    version, after = values(1), values(2)
    safetensors_file.write(tmp_path / "version", version, durable=False)
    old = {name: array for name, array in values(3).items() if name not in PLAIN}
    safetensors_file.write(tmp_path / "old", old, durable=False)
    sent(tmp_path, after, 1, [tmp_path / "old"], tmp_path / "new")
    update = {name: after[name] - version[name] for name in SHAPES}
    codec, feedback = parse_codec(CODEC), Feedback([tmp_path / "old"], tmp_path / "expected")
    write_encoded(tmp_path / "update", update, codec, rng=np.random.default_rng(0), plain=PLAIN, feedback=feedback)
    expected = safetensors_file.read(tmp_path / "expected")
    found = safetensors_file.read(tmp_path / "new")
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)

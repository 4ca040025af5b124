"""The concatenation against numpy's, whatever the boxes of the updates; and the checks of rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold import concatenation
from atoll.aggregation.fold.concatenation import concatenate
from atoll.protocol.manifest import VersionManifest, parse_version
from atoll.tensors import safetensors_file
from atoll.tensors.coverage import check_rows
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.pieces import PIECE_BYTES_MIN
from tests.aggregation.models import random_cuts, store

KINDS = {"trees": (np.int32, ()), "values": (np.float32, (3,)), "flags": (np.uint8, (2, 2)), "big": (np.int64, ())}
LAYOUT = tuple(
    Tensor(name, dtype, shape)
    for name, dtype, shape in (
        ("big", "I64", (4,)),
        ("trees", "I32", (2,)),
        ("values", "F32", (5, 3)),
        ("flags", "U8", (0, 2, 2)),
    )
)


def some_rows(rng):
    """The arrays of one part, each with a number of rows of its own, often none; also extreme and odd bits."""
    arrays = {}
    for name, (dtype, behind) in KINDS.items():
        shape = (int(rng.integers(0, 6)) * int(rng.integers(0, 2)), *behind)
        raw = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
        arrays[name] = raw.view(dtype).reshape(shape)
        if dtype is np.float32:
            arrays[name] = np.nan_to_num(arrays[name], nan=-0.0)
    return arrays


def joined(parts):
    return {name: np.concatenate([part[name] for part in parts]) for name in KINDS}


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 30), num_updates=st.integers(1, 5), block=st.integers(1, 9))
def test_the_next_version_is_what_numpy_concatenates_bit_for_bit(tmp_path_factory, seed, num_updates, block):
    folder, rng = tmp_path_factory.mktemp("it"), np.random.default_rng(seed)
    base, updates = some_rows(rng), [some_rows(rng) for _ in range(num_updates)]
    safetensors_file.write(folder / "base", base, metadata={"kept": "as it is"})
    stored = [
        store(
            folder / f"u{number}",
            update,
            cuts={name: random_cuts(rng, array.shape, depth=3) for name, array in update.items() if array.size},
        )
        for number, update in enumerate(updates)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concatenation, "TILE_ELEMENTS", block)
        folded = concatenate(folder / "base", stored, folder / "out")
    expected, found = joined([base, *updates]), safetensors_file.read(folder / "out")
    for name in KINDS:
        assert found[name].dtype == expected[name].dtype
        assert found[name].shape == expected[name].shape
        assert found[name].tobytes() == expected[name].tobytes()
    assert safetensors_file.read_metadata(folder / "out") == {"kept": "as it is"}
    manifest = VersionManifest.of(folded.pieces)
    assert parse_version(manifest.encode()) == manifest
    assert manifest.pieces == safetensors_file.pieces_of(manifest.layout, expected, manifest.piece_bytes)


def test_rows_that_were_there_keep_their_pieces(tmp_path):
    """A client that has a version downloads no full piece of it again."""
    size = PIECE_BYTES_MIN * 2 + 5
    safetensors_file.write(tmp_path / "base", {"a": np.arange(size, dtype=np.uint8)}, piece_bytes=PIECE_BYTES_MIN)
    first = safetensors_file.pieces_of(
        (Tensor("a", "U8", (size,)),), safetensors_file.read(tmp_path / "base"), PIECE_BYTES_MIN
    )
    folded = concatenate(tmp_path / "base", [store(tmp_path / "u", {"a": np.ones(7, np.uint8)})], tmp_path / "out")
    assert folded.pieces[:2] == first[:2]
    assert folded.pieces[2].lengths == (12,)


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"values": np.zeros((2, 4), np.float32)}, "is not inside the shape"),
        ({"values": np.zeros((2, 3), np.float16)}, "'values' has dtype 'F16'"),
        ({"more": np.zeros(2, np.float32)}, "'more' is not one of the model's 4"),
        ({"trees": np.zeros((2, 1), np.int32)}, "has 2 and 2 axes, allowed are 1"),
    ],
)
def test_an_update_of_another_kind_is_no_part_of_a_version(tmp_path, wrong, fault):
    safetensors_file.write(tmp_path / "base", some_rows(np.random.default_rng(1)))
    rows = {**some_rows(np.random.default_rng(2)), **wrong}
    with pytest.raises(ValueError, match=fault):
        concatenate(tmp_path / "base", [store(tmp_path / "u", rows)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_to_concatenate_is_refused(tmp_path):
    safetensors_file.write(tmp_path / "base", {"a": np.zeros(0, np.float32)})
    with pytest.raises(ValueError, match="no updates"):
        concatenate(tmp_path / "base", [], tmp_path / "out")


# ---------------------------------------------------------------- what an update declares

WHOLE = (
    Piece("big", "I64", (0,), (1,), ""),
    Piece("trees", "I32", (0,), (3,), ""),
    Piece("values", "F32", (0, 0), (2, 3), ""),
    Piece("flags", "U8", (0, 0, 0), (0, 2, 2), ""),
)


def declared(name, **changes):
    return tuple(replace(piece, **changes) if piece.tensor == name else piece for piece in WHOLE)


def test_any_number_of_rows_fits_in_any_boxes():
    assert check_rows(LAYOUT, WHOLE) == []
    halves = (Piece("values", "F32", (0, 0), (2, 2), ""), Piece("values", "F32", (0, 2), (2, 1), ""))
    assert check_rows(LAYOUT, (*WHOLE[:2], *halves, WHOLE[3])) == []


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        (WHOLE[1:], "tensor 'big' is missing: 0 elements"),
        ((*WHOLE, Piece("more", "F32", (0,), (1,), "")), "tensor 'more' is not one of the model's 4"),
        (declared("flags", dtype="I16"), "tensor 'flags' has dtype 'I16', allowed: U8"),
        (declared("values", dtype="F16"), "tensor 'values' has dtype 'F16', allowed: F32"),
        (declared("values", lengths=(2, 4)), "is not inside the shape"),
        (declared("values", lengths=(2, 2)), "tensor 'values' lacks 2 of 6 elements"),
        (declared("values", offsets=(1, 0)), "tensor 'values' lacks 3 of 9 elements"),
        (declared("values", offsets=(2**50, 0)), "lacks"),
        (declared("trees", offsets=(), lengths=()), "has 0 and 0 axes, allowed are 1"),
        ((*WHOLE, Piece("trees", "I32", (2,), (2,), "")), "overlapping"),
    ],
)
def test_pieces_that_are_no_rows_of_the_model_are_named(pieces, fault):
    assert any(fault in each for each in check_rows(LAYOUT, pieces)), check_rows(LAYOUT, pieces)

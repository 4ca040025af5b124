"""Masking file to file: the sum of masked files is the sum of the words, whatever the boxes, and however often."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.masked.encode import encode_update
from atoll.tensors.masked.mask import mask_part, mask_update
from atoll.tensors.safetensors_file import TensorFileCorrupted
from atoll.tensors.secure.exact import WrongSum, decode_exact
from atoll.tensors.secure.keystream import Streams
from atoll.tensors.secure.plan import Vector
from tests.tensors.masked.members import LAYOUT, meshes, pairwise, plan_of, stored, summed, update_of


def member(folder, number, plan, layout=LAYOUT):
    """Encode the update of a member."""
    path = folder / f"words{number}"
    encode_update(stored(folder / "update", update_of(layout, number)), path, layout=layout, plan=plan)
    return path


def opened(total, layout, bits, streams):
    """Take streams off a sum, one tensor at a time."""
    found = {}
    for tensor in layout:
        words = np.array(total[tensor.name], np.uint64 if tensor.dtype == "I64" else np.uint32)
        Streams(streams).add(words, starts_by_hand(layout)[tensor.name])
        found[tensor.name] = words
    return found


def starts_by_hand(layout):
    starts, position = {}, 0
    for tensor in layout:
        starts[tensor.name] = position
        position += -(-tensor.num_elements // 4) * 4
    return starts


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("members", [3, 10])
def test_the_sum_of_masked_files_is_that_of_the_words(tmp_path, bits, members):
    """fedbiomed#1210, #1056, #898: ten nodes with the most examples, whose sums do not overflow."""
    plan = plan_of(LAYOUT, bits, num_examples=1e9, examples_max=100)
    layout = Vector(LAYOUT, plan).masked
    streams, own = pairwise(members)
    words, masked = [], []
    for number, mine in enumerate(streams):
        path = member(tmp_path, number, plan)
        pieces = mask_update(path, tmp_path / "masked", layout, mine)
        raw = (tmp_path / "masked").read_bytes()
        mask_update(path, tmp_path / "again", layout, mine)
        assert (tmp_path / "again").read_bytes() == raw
        at = len(raw) - sum(piece.num_bytes for piece in pieces)
        for piece in pieces:
            assert hashlib.sha256(raw[at : at + piece.num_bytes]).hexdigest() == piece.sha256
            at += piece.num_bytes
        words.append(safetensors_file.read(path))
        masked.append(safetensors_file.read(tmp_path / "masked"))
        for tensor in layout:
            if tensor.num_elements > 3:
                assert np.mean(masked[-1][tensor.name] == words[-1][tensor.name]) < 0.1
    found = opened(summed(masked, bits), layout, bits, own)
    expected = summed(words, bits)
    assert {name: array.tolist() for name, array in found.items()} == expected
    sums = decode_exact(found["secure/exact"], Vector(LAYOUT, plan).exact, members)
    assert sums.weight == members << 52
    with pytest.raises(WrongSum, match=f"canaries are {members} instead of {members + 1}"):
        decode_exact(found["secure/exact"], Vector(LAYOUT, plan).exact, members + 1)


def test_a_sum_with_a_wrong_stream_is_seen_by_its_canaries(tmp_path):
    plan = plan_of(LAYOUT)
    layout = Vector(LAYOUT, plan).masked
    streams, own = pairwise(3)
    masked = []
    for number, mine in enumerate(streams):
        mask_update(member(tmp_path, number, plan), tmp_path / "masked", layout, mine)
        masked.append(safetensors_file.read(tmp_path / "masked"))
    for wrong in (own[1:], [(bytes(32), -1), *own[1:]], [(own[0][0], 1), *own[1:]]):
        found = opened(summed(masked, 32), layout, 32, wrong)
        with pytest.raises(WrongSum, match="canaries"):
            decode_exact(found["secure/exact"], Vector(LAYOUT, plan).exact, 3)
    found = opened(summed(masked[:2], 32), layout, 32, own)
    with pytest.raises(WrongSum, match="canaries"):
        decode_exact(found["secure/exact"], Vector(LAYOUT, plan).exact, 3)


@given(meshes(), st.sampled_from([32, 64]), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_the_masked_parts_of_a_mesh_are_the_boxes_of_one_masked_file(tmp_path_factory, mesh, bits, streams):
    shape, boxes = mesh
    folder = tmp_path_factory.mktemp("mesh")
    model = (Tensor("v", "F32", (3,)), Tensor("w", "F32", shape))
    plan = plan_of(model, bits)
    layout = Vector(model, plan).masked
    keys = [(bytes([number]) * 32, 1 - 2 * (number % 2)) for number in range(streams)]
    path = member(folder, 1, plan, model)
    mask_update(path, folder / "masked", layout, keys)
    words, masked = safetensors_file.read(path), safetensors_file.read(folder / "masked")
    for offsets, lengths in boxes:
        at = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        raw = [np.ascontiguousarray(words["w"][at]).tobytes(), words["v"].tobytes()]
        pieces = [
            Piece("w", layout[1].dtype, offsets, lengths, hashlib.sha256(raw[0]).hexdigest()),
            Piece("v", layout[0].dtype, (0,), (3,), hashlib.sha256(raw[1]).hexdigest()),
        ]
        (folder / "part").write_bytes(b"".join(raw))
        found = mask_part(folder / "part", folder / "out", layout, pieces, keys)
        expected = [np.ascontiguousarray(masked["w"][at]).tobytes(), masked["v"].tobytes()]
        assert (folder / "out").read_bytes() == b"".join(expected)
        assert [piece.sha256 for piece in found] == [hashlib.sha256(each).hexdigest() for each in expected]


def test_a_damaged_encoded_part_is_not_masked(tmp_path):
    layout = (Tensor("w", "I32", (4,)),)
    (tmp_path / "part").write_bytes(bytes(16))
    piece = Piece("w", "I32", (0,), (4,), hashlib.sha256(b"x").hexdigest())
    with pytest.raises(TensorFileCorrupted, match="'w' is not as it was encoded"):
        mask_part(tmp_path / "part", tmp_path / "out", layout, [piece], [])
    with pytest.raises(TensorFileCorrupted, match="too early"):
        mask_part(
            tmp_path / "part", tmp_path / "out", (Tensor("w", "I64", (4,)),), [Piece("w", "I64", (0,), (4,), "")], []
        )
    with pytest.raises(ValueError, match="'w' is not a tensor of the session's sum"):
        mask_part(tmp_path / "part", tmp_path / "out", (Tensor("v", "I32", (4,)),), [piece], [])


def test_a_file_of_another_layout_is_not_masked(tmp_path):
    plan = plan_of(LAYOUT)
    path = member(tmp_path, 1, plan)
    with pytest.raises(ValueError, match="its tensors are not those of the session's sum"):
        mask_update(path, tmp_path / "masked", Vector(LAYOUT, plan_of(LAYOUT, 64)).masked, [])

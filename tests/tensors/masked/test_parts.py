"""The parts of a mesh client: their words, masked, are those of one process, whatever the mesh."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, Tensor, pieces_in_order
from atoll.tensors.masked.encode import NotFinite, encode_update, exact_words, merged
from atoll.tensors.masked.mask import mask_part, mask_update
from atoll.tensors.masked.parts import assembled, encode_part, measure_part
from atoll.tensors.secure.masked_layout import EXACT
from atoll.tensors.secure.plan import Vector
from tests.tensors.masked.members import meshes, plan_of, stored, update_of

KEY = bytes(range(32))
STREAMS = [(bytes([7]) * 32, 1), (bytes([9]) * 32, -1)]


def plain_parts(folder, update, owners):
    """Write the plain parts of ranks, as `exchange/write` does: pieces in canonical order, one after the other."""
    names = {"float32": "F32", "int64": "I64"}
    found = []
    for rank, boxes in enumerate(owners):
        pieces = pieces_in_order(Piece(name, names[update[name].dtype.name], o, n, "") for name, o, n in boxes)
        path = folder / f"plain{rank}"
        path.write_bytes(b"".join(np.ascontiguousarray(update[p.tensor][at(p)]).tobytes() for p in pieces))
        found.append((path, pieces))
    return found


def at(piece):
    return tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))


@given(meshes(), meshes(), st.sampled_from([32, 64]), st.integers(0, 2**20), st.integers(1, 8), st.floats(0.01, 3))
@settings(max_examples=50, deadline=None)
def test_the_parts_of_any_mesh_are_the_masked_file_of_one_process(
    tmp_path_factory, mesh, other, bits, seed, ranks, size
):
    folder, draw = tmp_path_factory.mktemp("mesh"), np.random.default_rng(seed)
    shapes = {"n": other, "w": mesh, "v": ((3,), [((0,), (3,))])}
    layout = tuple(Tensor(name, "I64" if name == "n" else "F32", shape) for name, (shape, _) in shapes.items())
    update, plan = update_of(layout, seed, size), plan_of(layout, bits)
    owners = [[] for _ in range(ranks)]
    for name, (_, boxes) in shapes.items():
        for box in boxes:
            owners[int(draw.integers(ranks))].append((name, *box))
    vector, parts = Vector(layout, plan), plain_parts(folder, update, owners)
    measures = [measure_part(*part) for part in parts]
    found = merged([measure for measure, _ in measures])
    integers = assembled(layout, [box for _, boxes in measures for box in boxes])
    exact = exact_words(vector, plan, found, integers)
    path = stored(folder / "update", update)
    done = encode_update(path, folder / "words", layout=layout, plan=plan, rounding=KEY)
    assert found.norm == pytest.approx(done.norm, rel=1e-14)
    mask_update(folder / "words", folder / "masked", vector.masked, STREAMS)
    whole = safetensors_file.read(folder / "masked")
    seen = {name: np.zeros(array.shape, int) for name, array in whole.items()}
    for rank, (plain, pieces) in enumerate(parts):
        options = {"vector": vector, "plan": plan, "norm": done.norm, "rounding": KEY}
        words = encode_part(plain, folder / "w", pieces, exact=exact if rank == 0 else None, **options)
        masked = mask_part(folder / "w", folder / "m", vector.masked, words, STREAMS)
        raw, position = (folder / "m").read_bytes(), 0
        assert list(masked) == list(pieces_in_order(masked))
        for piece in masked:
            dtype = whole[piece.tensor].dtype
            box = np.frombuffer(raw, dtype, piece.num_elements, position).reshape(piece.lengths)
            assert np.array_equal(box, whole[piece.tensor][at(piece)])
            seen[piece.tensor][at(piece)] += 1
            position += piece.num_bytes
    assert all((count == 1).all() for count in seen.values())
    assert seen[EXACT].size == vector.exact.size


def test_the_norm_is_of_all_ranks_boxes(tmp_path):
    """pytorch#170862, VeOmni#184, SpecForge#663: not of one shard, and a box that two ranks hold is owned by one."""
    layout = (Tensor("w", "F32", (4,)),)
    update = {"w": np.array([3.0, 0, 0, 4.0], np.float32)}
    parts = plain_parts(tmp_path, update, [[("w", (0,), (2,))], [("w", (2,), (2,))]])
    measures = [measure_part(*part)[0] for part in parts]
    assert [measure.norm for measure in measures] == [3.0, 4.0]
    found = merged(measures)
    assert found.norm == 5.0
    plan = plan_of(layout, 64, num_examples=100)
    options = {"vector": Vector(layout, plan), "plan": plan, "norm": found.norm, "rounding": KEY}
    words = []
    for plain, pieces in parts:
        encode_part(plain, tmp_path / "w", pieces, **options)
        words += np.frombuffer((tmp_path / "w").read_bytes(), np.int64).tolist()
    assert np.abs(np.array(words) / (2**43 - 1) - [0.6, 0, 0, 0.8]).max() < 1e-12


def test_a_part_that_is_not_finite_fails_at_its_rank(tmp_path):
    parts = plain_parts(tmp_path, {"w": np.array([1.0, np.inf], np.float32)}, [[("w", (0,), (2,))]])
    with pytest.raises(NotFinite, match="NaN or infinite values in w"):
        measure_part(*parts[0])


def test_integer_boxes_must_cover_their_tensors_once():
    layout = (Tensor("n", "I64", (3,)),)
    box = (Piece("n", "I64", (0,), (2,), ""), np.array([1, 2]))
    with pytest.raises(ValueError, match="the boxes of n do not cover it once"):
        assembled(layout, [box])
    with pytest.raises(ValueError, match="'m' is not one of the 1 integer tensor"):
        assembled(layout, [(Piece("m", "I64", (0,), (2,), ""), np.array([1, 2]))])
    last = (Piece("n", "I64", (2,), (1,), ""), np.array([5]))
    assert assembled(layout, [box, last])["n"].tolist() == [1, 2, 5]

import dataclasses
import math
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.tensors.safetensors_file import TensorFileCorrupted
from atoll.tensors.updates import inspection
from atoll.tensors.updates.inspection import TILE_ELEMENTS, Inspector, inspect
from atoll.tensors.updates.tensor_stats import BYTES_MAX
from tests.aggregation.models import random_cuts, store, widened
from tests.tensors.encoded_by_hand import store_encoded

TILE_BYTES = 4 * TILE_ELEMENTS

MIXED = {
    "w": np.linspace(-3, 2, 700, dtype=np.float32).reshape(70, 10),
    "h": np.array([1, -65504, 2], np.float16),
    "b": np.array([0xC040, 0x3F80], np.uint16),
    "n": np.array(-(1 << 63)),
    "i": np.array([-128, 127], np.int8),
    "none": np.zeros((0, 2), np.float32),
}


def inspect_from(update):
    return Inspector(update.path, update.pieces, data_start=update.data_start)


def inspected(update):
    return inspect(update.path, update.pieces, data_start=update.data_start)


def test_inspection_records_magnitudes_and_norms_of_a_sound_update(tmp_path):
    cuts = {"w": random_cuts(np.random.default_rng(1), (70, 10), depth=9)}
    result = inspected(store(tmp_path / "u", MIXED, cuts=cuts, junk=b"123"))
    assert result.is_sound
    assert result.magnitudes == {"w": 3.0, "h": 65504.0, "b": 3.0, "n": 1 << 63, "i": 128, "none": 0.0}
    assert {type(result.magnitudes[name]) for name in ("n", "i")} == {int}
    for name, array in MIXED.items():
        expected = math.fsum(float(value) ** 2 for value in widened(array).reshape(-1))
        assert result.squared_norms[name] == pytest.approx(expected, rel=1e-14)


def test_inspection_counts_nan_and_infinity_by_tensor(tmp_path):
    values = np.ones(3 * TILE_ELEMENTS, np.float32)
    values[[0, TILE_ELEMENTS, -1]] = np.nan, np.inf, -np.inf
    values[5] = -7
    arrays = {
        "w": values,
        "h": np.array([np.nan, np.nan], np.float16),
        "b": np.array([0x7FC0, 0x7F80, 0x3F80], np.uint16),
        "ok": np.array([3e38], np.float32),
    }
    result = inspected(store(tmp_path / "u", arrays))
    assert not result.is_sound
    assert result.wrong_digests == ()
    assert result.non_finite == {"w": 3, "h": 2, "b": 2}
    assert result.magnitudes == {"w": 7.0, "h": 0.0, "b": 1.0, "ok": pytest.approx(3e38)}
    assert result.squared_norms["w"] == 3 * TILE_ELEMENTS - 4 + 49


@settings(max_examples=60, deadline=None)
@example(at=95, bit=6)  # a signalling NaN, of which numpy warns
@given(at=st.integers(0, 70 * 10 * 4 - 1), bit=st.integers(0, 7))
def test_inspection_finds_the_piece_of_any_flipped_bit(tmp_path_factory, at, bit):
    path = tmp_path_factory.getbasetemp() / "flipped"
    cuts = random_cuts(np.random.default_rng(2), (70, 10), depth=6)
    update = store(path, {"w": MIXED["w"]}, cuts={"w": cuts})
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)
    position = 0
    for piece in update.pieces:
        if position <= at < position + piece.num_bytes:
            assert inspected(update).wrong_digests == (piece,)
        position += piece.num_bytes


def test_inspection_finds_wrong_digests_of_the_manifest(tmp_path):
    update = store(tmp_path / "u", MIXED)
    pieces = tuple(dataclasses.replace(p, sha256=p.sha256[::-1]) if p.tensor in "nw" else p for p in update.pieces)
    assert {piece.tensor for piece in inspect(update.path, pieces).wrong_digests} == {"n", "w"}


def test_inspection_raises_when_the_file_is_too_short(tmp_path):
    update = store(tmp_path / "u", MIXED)
    os.truncate(update.path, update.path.stat().st_size - 1)
    with pytest.raises(TensorFileCorrupted, match="1 byte too early"):
        inspected(update)


@pytest.mark.usefixtures("compiled")
def test_inspection_memory_is_bounded_by_its_tiles(tmp_path):
    update = store(tmp_path / "u", {"w": np.ones(32 * TILE_ELEMENTS, np.float32)})
    tracemalloc.start()
    try:
        result = inspected(update)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.squared_norms["w"] == 32 * TILE_ELEMENTS
    assert peak < 6 * TILE_BYTES


@settings(deadline=None, max_examples=40)
@given(ends=st.lists(st.integers(0, 90_000), max_size=8), codec=st.sampled_from(["", "qsgd8"]), in_memory=st.booleans())
def test_an_inspection_beside_the_bytes_finds_what_one_at_the_end_finds(tmp_path_factory, ends, codec, in_memory):
    folder, rng = tmp_path_factory.mktemp("grows"), np.random.default_rng(4)
    arrays = {**MIXED, "large": rng.standard_normal(20_000).astype(np.float32)}
    update = store(folder / "whole", arrays, cuts={"large": random_cuts(rng, (20_000,), depth=3)})
    if codec:
        update, _ = store_encoded(folder / "encoded", {"large": arrays["large"]}, {"large": codec}, junk=b"12")
    data, grows = update.path.read_bytes(), folder / "grows"
    grows.write_bytes(b"")
    inspector = Inspector(grows, update.pieces, data_start=update.data_start)
    for end in sorted(ends):
        with grows.open("ab") as file:
            last = data[file.tell() : end]
            file.write(last)
        inspector.advance(min(end, len(data)), memoryview(last) if in_memory else b"")
        assert inspector.next_end > min(end, len(data))
    grows.write_bytes(data)
    assert inspector.finish() == inspected(update)


@pytest.mark.parametrize("middle", [1, 100_001, 2 * BYTES_MAX + 3])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_integers_have_exact_norms_wherever_their_bytes_are_cut(tmp_path, middle, dtype):
    values = np.random.default_rng(middle).integers(0, 255, 2 * BYTES_MAX + 5, dtype, endpoint=True)
    update = store(tmp_path / "u", {"w": values})
    data, inspector = update.path.read_bytes(), inspect_from(update)
    middle += update.data_start
    inspector.advance(middle, memoryview(data)[:middle])
    inspector.advance(len(data), memoryview(data)[middle:])
    result = inspector.finish()
    assert result.is_sound
    assert result.squared_norms["w"] == sum(int(value) ** 2 for value in values)
    assert result.magnitudes["w"] == values.max()


@pytest.mark.usefixtures("compiled")
def test_an_inspection_that_waits_holds_no_bytes(tmp_path):
    update = store(tmp_path / "u", {"w": np.zeros(3 * TILE_ELEMENTS, np.float32)})
    inspector = inspect_from(update)
    tracemalloc.start()
    inspector.advance(update.data_start + TILE_BYTES)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert inspector.next_end == update.data_start + 2 * TILE_BYTES
    assert held < 100_000


@pytest.mark.parametrize("junk", [b"", b"123"])  # what is in memory begins within a tile, too
def test_what_is_in_memory_is_not_read_from_the_file_again(tmp_path, monkeypatch, junk):
    values = np.random.default_rng(3).standard_normal(4 * TILE_ELEMENTS).astype(np.float32)
    update = store(tmp_path / "u", {"w": values}, junk=junk)
    data, reads, read_into = update.path.read_bytes(), [], inspection.read_into

    def reading(buffer, source, position, *, path):
        reads.append((position - update.data_start) // TILE_BYTES)
        read_into(buffer, source, position, path=path)

    monkeypatch.setattr(inspection, "read_into", reading)
    inspector, middle = inspect_from(update), update.data_start + 3 * TILE_BYTES // 2
    inspector.advance(middle, memoryview(data)[:middle])
    inspector.advance(len(data), memoryview(data)[middle:])
    found = inspector.finish()
    assert reads == [1]  # that one lies in both parts
    monkeypatch.undo()
    assert found == inspected(update)
    assert found.is_sound


def test_wrong_bytes_in_memory_are_found(tmp_path):
    update = store(tmp_path / "u", {"w": np.ones(2 * TILE_ELEMENTS, np.float32)})
    data = bytearray(update.path.read_bytes())
    data[-1] ^= 1
    inspector = inspect_from(update)
    inspector.advance(len(data), data)
    assert inspector.finish().wrong_digests == update.pieces


def test_words_have_digests_and_no_values(tmp_path):
    """Of masked updates: no magnitude, no norm, and a wrong digest is found in whichever piece."""
    words = {"w": np.arange(10, dtype=np.int32), "secure/exact": np.arange(3, dtype=np.int64)}
    update = store(tmp_path / "u", words)
    found = inspect(update.path, update.pieces, has_values=False)
    assert found.is_sound
    assert (found.magnitudes, found.squared_norms, found.non_finite) == ({}, {}, {})
    raw = bytearray(update.path.read_bytes())
    raw[-1] ^= 1
    update.path.write_bytes(bytes(raw))
    found = inspect(update.path, update.pieces, has_values=False)
    assert [piece.tensor for piece in found.wrong_digests] == ["w"]

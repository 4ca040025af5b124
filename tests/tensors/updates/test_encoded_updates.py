"""Encoded updates on disk: read, inspected and folded as what they decode to."""

import math
import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import Weighted, fold
from atoll.aggregation.rules.coordinate import Median
from atoll.aggregation.rules.geometric import MultiKrum
from atoll.aggregation.rules.gram import gram_matrix
from atoll.tensors import safetensors_file
from atoll.tensors.codecs.chunks import encoded_bytes
from atoll.tensors.codecs.codec import CHUNK_ELEMENTS
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import Tensor
from atoll.tensors.updates.inspection import inspect
from atoll.tensors.updates.reader import UpdateReader
from tests.aggregation.models import random_cuts, store
from tests.tensors.blocks import read_block
from tests.tensors.encoded_by_hand import NAMES, store_encoded

codecs = st.sampled_from(NAMES)


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=120, deadline=None)
@given(
    codec=codecs,
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    depth=st.integers(0, 12),
    seed=st.integers(0, 1 << 20),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_reader_gives_any_range_of_any_boxes_as_the_whole_decodes(tmp_path_factory, codec, shape, depth, seed, ends):
    array = normal(shape, seed)
    cuts = random_cuts(np.random.default_rng(seed), shape, depth=depth)
    path = tmp_path_factory.getbasetemp() / "encoded"
    arrays = {"plain": array, "w": array, "n": np.arange(3)}
    update, values = store_encoded(path, arrays, {"w": codec}, cuts={"w": cuts}, junk=bytes(seed % 5))
    start, stop = sorted(round(end * array.size) for end in ends)
    for name, expected in values.items():
        low, high = (start, stop) if name != "n" else (1, 3)
        block = read_block(update, Tensor(name, "F32" if name != "n" else "I64", expected.shape), low, high)
        assert block.tobytes() == expected.reshape(-1)[low:high].astype(block.dtype).tobytes()


WIDE = 3 * CHUNK_ELEMENTS + 777


@pytest.mark.parametrize("codec", NAMES)
def test_reader_reads_only_the_chunks_that_a_block_meets(tmp_path, codec, monkeypatch):
    update, values = store_encoded(tmp_path / "u", {"w": normal(WIDE)}, {"w": codec})
    reads, preadv = [], os.preadv
    tensor, size = Tensor("w", "F32", (WIDE,)), encoded_bytes(parse_codec(codec), CHUNK_ELEMENTS)
    with UpdateReader(update) as reader:
        monkeypatch.setattr(
            os, "preadv", lambda fd, views, at: reads.append((at, len(views[0]))) or preadv(fd, views, at)
        )
        block = reader.read(tensor, CHUNK_ELEMENTS + 5, 2 * CHUNK_ELEMENTS + 5)
    assert block.tobytes() == values["w"][CHUNK_ELEMENTS + 5 : 2 * CHUNK_ELEMENTS + 5].tobytes()
    assert reads == [(size, size), (2 * size, size)]


def test_reader_names_the_update_and_the_tensor_of_malformed_bytes(tmp_path):
    update, _ = store_encoded(tmp_path / "u", {"w": normal(100)}, {"w": "sign"}, spoil=lambda raw: b"\xff" * len(raw))
    with pytest.raises(ValueError, match=r"update .*/u: tensor 'w': elements 0\.\.100: sign: a scale is not in"):
        read_block(update, Tensor("w", "F32", (100,)), 0, 1)


@settings(max_examples=60, deadline=None)
@given(codec=codecs, n=st.integers(1, 500), depth=st.integers(0, 5), seed=st.integers(0, 1 << 20))
def test_inspection_records_what_the_pieces_decode_to(tmp_path_factory, codec, n, depth, seed):
    path, cuts = tmp_path_factory.getbasetemp() / "u", random_cuts(np.random.default_rng(seed), (n,), depth=depth)
    update, values = store_encoded(path, {"w": normal(n, seed), "b": normal(3)}, {"w": codec}, cuts={"w": cuts})
    found = inspect(update.path, update.pieces)
    assert found.is_sound
    for name, array in values.items():
        assert found.magnitudes[name] == np.abs(array).max()
        assert found.squared_norms[name] == pytest.approx(math.fsum(float(v) ** 2 for v in array), rel=1e-14)


@pytest.mark.parametrize("codec", NAMES)
def test_inspection_of_chunks_equals_that_of_their_values(tmp_path, codec):
    update, values = store_encoded(tmp_path / "u", {"w": normal(WIDE)}, {"w": codec})
    plain = store(tmp_path / "p", values)
    encoded, raw = inspect(update.path, update.pieces), inspect(plain.path, plain.pieces)
    assert (encoded.magnitudes, encoded.squared_norms) == (raw.magnitudes, raw.squared_norms)
    in_memory = inspect(tmp_path / "nowhere", update.pieces, data=update.path.read_bytes())
    assert in_memory == encoded


@settings(max_examples=150, deadline=None)
@given(codec=codecs, n=st.integers(1, 300), data=st.data())
def test_hostile_bytes_are_malformed_or_finite_and_within_what_is_recorded(tmp_path_factory, codec, n, data):
    def spoil(raw):
        raw = bytearray(raw)
        for _ in range(data.draw(st.integers(1, 5))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        return bytes(raw)

    path = tmp_path_factory.getbasetemp() / "u"
    update, _ = store_encoded(path, {"w": normal(n)}, {"w": codec}, spoil=spoil)
    found, tensor = inspect(update.path, update.pieces), Tensor("w", "F32", (n,))
    assert found.wrong_digests == ()
    if found.is_sound:
        block = read_block(update, tensor, 0, n)
        assert np.isfinite(block).all()
        assert found.magnitudes["w"] == np.abs(block).max()
    else:
        assert found.malformed["w"].startswith(f"{codec}: ")
        with pytest.raises(ValueError, match="tensor 'w'"):
            read_block(update, tensor, 0, n)


def test_damage_on_the_way_is_a_wrong_digest_whatever_it_decodes_to(tmp_path):
    update, _ = store_encoded(tmp_path / "u", {"w": normal(1000)}, {"w": "topk:0.05"})
    content = bytearray(update.path.read_bytes())
    content[-1] ^= 0x40  # an index
    update.path.write_bytes(content)
    found = inspect(update.path, update.pieces)
    assert [piece.tensor for piece in found.wrong_digests] == ["w"]
    assert set(found.malformed) == {"w"}


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_inspection_of_a_few_bytes_that_decode_to_many_takes_little_memory(tmp_path):
    n = 200 * CHUNK_ELEMENTS
    update, _ = store_encoded(tmp_path / "u", {"w": np.zeros(n, np.float32)}, {"w": "topk:0.000001"})
    assert update.path.stat().st_size == 200 * 6
    tracemalloc.start()
    try:
        assert inspect(update.path, update.pieces).is_sound
        assert tracemalloc.get_traced_memory()[1] < 16 * CHUNK_ELEMENTS
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- the fold


ARRAYS = {"w": (2, CHUNK_ELEMENTS - 100), "b": (1000,), "n": ()}


def cohort(tmp_path, names):
    """An encoded update for each codec, and the plain one that it decodes to, both with what inspection records."""
    encoded, plain = [], []
    for k, codec in enumerate(names):
        arrays = {name: normal(shape, seed=10 * k + len(name)) for name, shape in ARRAYS.items() if name != "n"}
        arrays["n"] = np.array(k)
        update, values = store_encoded(tmp_path / f"e{k}", arrays, dict.fromkeys(("w", "b"), codec) if codec else {})
        for items, one in ((encoded, update), (plain, store(tmp_path / f"p{k}", values))):
            items.append(replace(one, magnitudes=inspect(one.path, one.pieces).magnitudes))
    return encoded, plain


def folded(tmp_path, updates, step=Step(), **execution):  # noqa: B008 - a value
    safetensors_file.write(
        tmp_path / "base", {name: np.zeros(shape, np.float32) for name, shape in ARRAYS.items()} | BASE
    )
    fold(
        tmp_path / "base",
        [Weighted(u, 10 + k) for k, u in updates],
        tmp_path / "out",
        step=step,
        execution=Execution(**execution),
    )
    return (tmp_path / "out").read_bytes()


BASE = {"n": np.array(5)}


@pytest.mark.parametrize("rule", [None, Median(), MultiKrum(1)], ids=["mean", "median", "multi_krum"])
def test_fold_of_encoded_updates_has_the_bits_of_the_fold_of_their_values(tmp_path, rule):
    encoded, plain = cohort(tmp_path, (*NAMES, ""))
    step = Step(rule=rule)
    expected = folded(tmp_path, list(enumerate(plain)), step=step)
    assert folded(tmp_path, list(enumerate(encoded)), step=step) == expected
    for tile in (1 << 14, 1 << 17):
        assert folded(tmp_path, list(enumerate(encoded)), step=step, tile_elements=tile, threads=2) == expected


def test_fold_of_encoded_updates_depends_on_no_order(tmp_path):
    encoded, _ = cohort(tmp_path, ("topk:0.05", "sign", "qsgd8"))
    updates = list(enumerate(encoded))
    assert folded(tmp_path, updates) == folded(tmp_path, updates[::-1])


def test_gram_of_encoded_updates_is_that_of_their_values(tmp_path):
    encoded, plain = cohort(tmp_path, NAMES)
    layout = [Tensor(name, "F32", shape) for name, shape in ARRAYS.items() if name != "n"]
    readers = [{str(k): UpdateReader(u, keep_open=False) for k, u in enumerate(side)} for side in (encoded, plain)]
    assert np.array_equal(*(gram_matrix(layout, side) for side in readers))


def test_fold_refuses_values_beyond_the_recorded_magnitude(tmp_path):
    [update], _ = cohort(tmp_path, ["bf16"])
    with pytest.raises(ValueError, match=r"beyond its recorded magnitude 0\.5"):
        folded(tmp_path, [(0, replace(update, magnitudes={**update.magnitudes, "w": 0.5}))])

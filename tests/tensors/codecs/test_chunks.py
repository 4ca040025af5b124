import itertools
import os
import tracemalloc
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.tensors import safetensors_file
from atoll.tensors.codecs.chunks import chunk_bounds, decode_range, encode_chunks, encoded_bytes
from atoll.tensors.codecs.codec import CHUNK_ELEMENTS
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import Tensor
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader

NAMES = ["bf16", "fp16", "qsgd8", "sign", "topk:0.01"]
SIZES = [0, 1, 511, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS + 77]
LARGEST = SIZES[-1]
VALUES = np.random.default_rng(5).standard_normal(LARGEST).astype(np.float32)


def encoded(name, n, *, seed=0):
    parts = encode_chunks(parse_codec(name), n, lambda start, stop: VALUES[start:stop], np.random.default_rng(seed))
    return b"".join(parts)


def slice_of(data):
    return lambda position, length: data[position : position + length]


WHOLE = {name: encoded(name, LARGEST) for name in NAMES}
DECODED = {name: decode_range(parse_codec(name), LARGEST, 0, LARGEST, slice_of(data)) for name, data in WHOLE.items()}


@pytest.mark.parametrize("n", SIZES)
def test_chunks_cover_every_element_once(n):
    bounds = list(chunk_bounds(n))
    assert [start for start, _ in bounds] + [n] == [0] + [stop for _, stop in bounds]
    assert all(0 < stop - start <= CHUNK_ELEMENTS for start, stop in bounds)
    assert all(stop - start == CHUNK_ELEMENTS for start, stop in bounds[:-1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", SIZES)
def test_size_of_a_tensor_is_exact(name, n):
    data = encoded(name, n)
    assert len(data) == encoded_bytes(parse_codec(name), n)
    assert decode_range(parse_codec(name), n, 0, n, slice_of(data)).shape == (n,)


def test_size_of_a_huge_tensor_costs_nothing():
    assert encoded_bytes(parse_codec("bf16"), 1 << 40) == 1 << 41


@pytest.mark.parametrize("name", NAMES)
def test_every_chunk_is_coded_by_itself(name):
    codec = parse_codec(name)
    rng = np.random.default_rng(0)
    alone = [codec.decode(codec.encode(VALUES[a:b], rng), b - a) for a, b in chunk_bounds(LARGEST)]
    assert np.concatenate(alone).tobytes() == DECODED[name].tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_gives_the_same_bytes(name):
    assert encoded(name, LARGEST) == WHOLE[name]
    assert (encoded(name, LARGEST, seed=1) == WHOLE[name]) == (name != "qsgd8")


EDGES = sorted({0, 1, LARGEST - 1, LARGEST} | {k * CHUNK_ELEMENTS + d for k in (1, 2, 3) for d in (-1, 0, 1)})


@pytest.mark.parametrize("name", NAMES)
def test_any_range_of_edges_equals_the_whole(name):
    for start, stop in itertools.combinations_with_replacement(EDGES, 2):
        part = decode_range(parse_codec(name), LARGEST, start, stop, slice_of(WHOLE[name]))
        assert part.tobytes() == DECODED[name][start:stop].tobytes()


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(NAMES), ends=st.tuples(st.integers(0, LARGEST), st.integers(0, LARGEST)))
@example(name="qsgd8", ends=(CHUNK_ELEMENTS, CHUNK_ELEMENTS))
def test_any_range_equals_the_whole_and_reads_only_its_chunks(name, ends):
    codec, data, (start, stop) = parse_codec(name), WHOLE[name], sorted(ends)
    reads = []

    def read(position, length):
        reads.append((position, position + length))
        return data[position : position + length]

    assert decode_range(codec, LARGEST, start, stop, read).tobytes() == DECODED[name][start:stop].tobytes()
    met = [(a, b) for a, b in chunk_bounds(LARGEST) if a < stop and start < b and start < stop]
    assert reads == [(encoded_bytes(codec, a), encoded_bytes(codec, b)) for a, b in met]


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (2, 1), (0, LARGEST + 1), (LARGEST + 1, LARGEST + 1)])
def test_range_outside_the_tensor_is_refused_before_a_read(start, stop):
    with pytest.raises(IndexError, match=rf"elements {start}\.\.{stop} are not in 0\.\.{LARGEST}"):
        decode_range(parse_codec("sign"), LARGEST, start, stop, lambda *_: pytest.fail("read"))


def test_malformed_chunk_is_named_and_spares_its_neighbours():
    codec, data = parse_codec("sign"), bytearray(WHOLE["sign"])
    first = codec.num_bytes(CHUNK_ELEMENTS)
    data[first + 3] |= 0x80  # the sign of the second chunk's scale
    with pytest.raises(ValueError, match=r"^elements 65536\.\.131072: sign: a scale is not in"):
        decode_range(codec, LARGEST, 0, LARGEST, slice_of(bytes(data)))
    rest = decode_range(codec, LARGEST, 2 * CHUNK_ELEMENTS, LARGEST, slice_of(bytes(data)))
    assert rest.tobytes() == DECODED["sign"][2 * CHUNK_ELEMENTS :].tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_end_too_early_are_refused(name):
    with pytest.raises(ValueError, match=rf"^elements 196608\.\.{LARGEST}: {name}: .* bytes for 77 elements"):
        decode_range(parse_codec(name), LARGEST, 0, LARGEST, slice_of(WHOLE[name][:-1]))


def test_value_that_cannot_be_coded_is_named():
    values = np.ones(CHUNK_ELEMENTS + 3, np.float32)
    values[-1] = np.nan
    parts = encode_chunks(parse_codec("sign"), values.size, lambda a, b: values[a:b], np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"^elements 65536\.\.65539: sign: values in nan\.\.nan"):
        list(parts)


def test_stored_update_streams_to_a_file_and_back_in_bounded_memory(tmp_path):
    n = 64 * CHUNK_ELEMENTS
    values = np.resize(VALUES, n).reshape(64, -1)
    pieces = safetensors_file.write(tmp_path / "u", {"w": values})
    _, data_start = safetensors_file.parse_header(tmp_path / "u")
    tensor, codec = Tensor("w", "F32", values.shape), parse_codec("qsgd8")
    tracemalloc.start()
    try:
        with UpdateReader(StoredUpdate(tmp_path / "u", pieces, data_start=data_start)) as reader:
            with (tmp_path / "c").open("wb") as file:
                file.writelines(encode_chunks(codec, n, partial(reader.read, tensor), np.random.default_rng(0)))
        with (tmp_path / "c").open("rb") as file:
            pread = lambda position, length: os.pread(file.fileno(), length, position)  # noqa: E731
            part = decode_range(codec, n, 10 * CHUNK_ELEMENTS - 5, 10 * CHUNK_ELEMENTS + 5, pread)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "c").stat().st_size == encoded_bytes(codec, n)
    assert np.abs(part - values.reshape(-1)[10 * CHUNK_ELEMENTS - 5 : 10 * CHUNK_ELEMENTS + 5]).max() < 0.25
    assert peak < 12 * 4 * CHUNK_ELEMENTS

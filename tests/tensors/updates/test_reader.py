import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.tensors.layout import Tensor
from atoll.tensors.safetensors_file import TensorFileCorrupted
from atoll.tensors.updates import reader as blocks
from atoll.tensors.updates.reader import UpdateReader
from tests.aggregation.models import DTYPES, random_cuts, store, widened
from tests.tensors.blocks import read_block

shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)


def values_of(shape, kind, seed=0):
    rng = np.random.default_rng(seed)
    return np.asarray(rng.integers(-100, 100, shape) if kind != "<u2" else rng.integers(0, 1 << 14, shape)).astype(kind)


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes,
    depth=st.integers(0, 12),
    seed=st.integers(0, 1 << 20),
    kind=st.sampled_from(["<f4", "<f2", "<u2", "<i8", "|i1"]),
    short_run=st.sampled_from([1, 3, 64]),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_reader_gives_any_range_of_any_boxes_as_numpy_slices_it(
    tmp_path_factory, shape, depth, seed, kind, short_run, ends
):
    path = tmp_path_factory.getbasetemp() / "blocks"
    array = values_of(shape, kind, seed)
    tensor = Tensor("w", DTYPES[kind], shape)
    start, stop = sorted(round(end * array.size) for end in ends)
    cuts = random_cuts(np.random.default_rng(seed), shape, depth=depth)
    update = store(path, {"other": array, "w": array}, cuts={"w": cuts}, junk=bytes(seed % 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "SHORT_RUN", short_run)
        block = read_block(update, tensor, start, stop)
        room = np.full(stop - start, 77, block.dtype)
        with UpdateReader(update) as reader:
            assert reader.read(tensor, start, stop, room) is room
    assert block.dtype == (np.int64 if array.dtype.kind == "i" else np.float32)
    assert np.array_equal(block, widened(array).reshape(-1)[start:stop])
    assert np.array_equal(room, block)


def test_reader_reassembles_boxes_that_are_interleaved_one_element_apart(tmp_path):
    array = values_of((40, 16), "<f4")
    cuts = [((0, column), (40, 1)) for column in range(16)]
    update = store(tmp_path / "u", {"w": array}, cuts={"w": cuts})
    assert np.array_equal(read_block(update, Tensor("w", "F32", (40, 16)), 7, 633), array.reshape(-1)[7:633])


def test_reader_reads_only_the_bytes_of_the_block(tmp_path):
    array = values_of((1 << 16, 2), "<f4")
    update = store(tmp_path / "u", {"w": array}, cuts={"w": [((0, 0), (1 << 16, 1)), ((0, 1), (1 << 16, 1))]})
    num_bytes = []
    preadv = os.preadv

    def counting(fd, views, position, flags=0):
        if not flags:  # with some, it is asked whether there is anything in memory
            num_bytes.append(sum(len(view) for view in views))
        return preadv(fd, views, position, flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counting)
        block = read_block(update, Tensor("w", "F32", (1 << 16, 2)), 1001, 2002)
    assert np.array_equal(block, array.reshape(-1)[1001:2002])
    assert sorted(num_bytes) == [500 * 4, 501 * 4]


@pytest.mark.parametrize("keep_open", [True, False])
def test_reader_holds_at_most_one_file_and_none_after_exit(tmp_path, keep_open):
    update = store(tmp_path / "u", {"w": values_of((3,), "<f4"), "v": values_of((2, 2), "<i8")})
    before = len(os.listdir("/proc/self/fd"))
    with UpdateReader(update, keep_open=keep_open) as reader:
        for _ in range(3):
            assert reader.read(Tensor("v", "I64", (2, 2)), 0, 4).size == 4
        assert len(os.listdir("/proc/self/fd")) == before + keep_open
        assert reader.carries("v")
        assert not reader.carries("x")
    assert len(os.listdir("/proc/self/fd")) == before


def test_reader_refuses_what_is_not_there(tmp_path):
    tensor = Tensor("w", "F32", (4,))
    update = store(tmp_path / "u", {"w": values_of((4,), "<f4")})
    with pytest.raises(KeyError, match="x"):
        read_block(update, Tensor("x", "F32", (4,)), 0, 1)
    for start, stop in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(IndexError, match=r"of tensor 'w' are not in 0\.\.4"):
            read_block(update, tensor, start, stop)
    os.truncate(tmp_path / "u", 15)
    with pytest.raises(TensorFileCorrupted, match="ends at byte 15, 1 byte too early"):
        read_block(update, tensor, 0, 4)


@pytest.mark.parametrize(
    ("answer", "dropped"),
    [
        (None, []),
        (BlockingIOError(11, "not in memory"), [(8, 12), (20, 4)]),
        (OSError(95, "not supported"), []),
    ],
)
def test_reader_drops_behind_itself_what_was_not_in_memory_and_nothing_else(tmp_path, monkeypatch, answer, dropped):
    array = values_of((6,), "<f4")
    update = store(tmp_path / "u", {"w": array})
    ranges = []
    preadv = os.preadv

    def asked(fd, views, position, flags=0):
        if flags and answer is not None:
            raise answer
        return preadv(fd, views, position)

    monkeypatch.setattr(os, "preadv", asked)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, length, advice: ranges.append((start, length)))
    with UpdateReader(update) as reader:
        for start, stop in ((2, 5), (5, 6)):
            assert np.array_equal(reader.read(Tensor("w", "F32", (6,)), start, stop), array[start:stop])
    assert ranges == dropped


def test_a_file_that_was_just_written_is_in_memory_and_one_that_was_dropped_is_not(tmp_path):
    path = tmp_path / "u"
    path.write_bytes(bytes(1 << 16))
    fd = os.open(path, os.O_RDONLY)
    try:
        assert blocks._begins_in_memory(fd)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not blocks._begins_in_memory(fd):
            os.pread(fd, 1, 0)
        assert blocks._begins_in_memory(fd)
    finally:
        os.close(fd)

"""Sources that are too large for memory give what a plain list of the same examples gives."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from atoll.parallel.data.batch import Batch
from atoll.parallel.data.loader import Loader
from atoll.parallel.data.order import Order
from atoll.parallel.data.shards import generator
from examples.datasets.iterable import IterableLoader, StreamOrder, mixed
from examples.datasets.streaming import ArrayShards, ByteTokens, Source
from examples.datasets.text import TokenWindows, load_tokens, pack_text

SIZES = (7, 0, 12, 1, 30)


def write_shards(folder: Path, kind: str) -> tuple[list[Source], TensorDataset]:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(sum(SIZES), 3)).astype(np.float32)
    targets = rng.integers(0, 9, size=sum(SIZES))
    sources: list[Source] = []
    start = 0
    for index, size in enumerate(SIZES):
        shard = {"inputs": inputs[start : start + size], "targets": targets[start : start + size]}
        if kind == "npz":
            np.savez_compressed(folder / f"{index}.npz", **shard)
            sources.append(folder / f"{index}.npz")
        else:
            pair = (folder / f"{index}-inputs.npy", folder / f"{index}-targets.npy")
            for path, array in zip(pair, shard.values(), strict=True):
                np.save(path, array)
            sources.append(pair)
        start += size
    return sources, TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets))


def same(left: Any, right: Any) -> bool:
    return all(
        torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) and a.count == b.count
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("kind", ["npz", "npy"])
@pytest.mark.parametrize("sampling", ["global", "partition"])
def test_shards_on_disk_give_the_batches_of_the_same_arrays_in_memory(tmp_path: Path, kind: str, sampling: Any) -> None:
    sources, in_memory = write_shards(tmp_path, kind)
    on_disk = ArrayShards(sources)
    assert on_disk.shards == SIZES
    order = Order(num_examples=50, batch_size=8, num_ranks=3, sampling=sampling, shards=on_disk.shards, open_shards=2)
    for rank in range(3):
        streamed, plain = Loader(on_disk, order, rank=rank, prefetch=2), Loader(in_memory, order, rank=rank)
        for _ in range(2):
            assert same(list(streamed), list(plain))


class Watched(ArrayShards):
    """Counts the files that it reads."""

    loads = 0

    def _load(self, source: Source) -> Any:
        self.loads += 1
        return super()._load(source)


@pytest.mark.parametrize(("num_open", "loads"), [(1, 5), (2, 3), (3, 3)])
def test_the_shards_at_hand_are_those_used_last(tmp_path: Path, num_open: int, loads: int) -> None:
    data = Watched(write_shards(tmp_path, "npz")[0], num_open=num_open)
    for index in (0, 7, 1, 20, 2):  # shards 0, 2, 0, 4, 0
        data[index]
    assert data.loads == loads


def test_with_the_orders_shards_every_file_is_read_once_in_an_epoch(tmp_path: Path) -> None:
    sources, _ = write_shards(tmp_path, "npz")
    data = Watched(sources, num_open=2)
    assert len(list(Loader(data, Order(num_examples=50, batch_size=4, shards=data.shards, open_shards=2)))) == 13
    assert data.loads == 4  # one of the five is empty


def test_a_shard_whose_arrays_differ_in_length_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", inputs=np.zeros(3), targets=np.zeros(2))
    with pytest.raises(ValueError, match=r"bad\.npz: 3 inputs, but 2 targets"):
        ArrayShards([tmp_path / "bad.npz"])


def test_text_files_give_the_windows_of_the_packed_corpus_on_any_rank(tmp_path: Path) -> None:
    paths = sorted(Path(json.__file__).parent.glob("*.py"))
    pack_text(paths, tmp_path / "tokens.npy")
    on_disk = TokenWindows(ByteTokens(paths), 64, eos=256)
    mapped = TokenWindows(load_tokens(tmp_path / "tokens.npy"), 64, eos=256)
    order = Order(num_examples=len(on_disk), batch_size=16, num_ranks=2, shards=on_disk.shards(50), open_shards=2)
    for rank in range(2):
        assert same(list(Loader(on_disk, order, rank=rank)), list(Loader(mapped, order, rank=rank)))


def numbers(size: int) -> Any:
    return lambda epoch: ((torch.tensor([float(100 * epoch + index)]), index) for index in range(size))


def shown(batch: Batch) -> list[int]:
    return [int(value) for value in batch.inputs.flatten().tolist()][: batch.count]


def endless(loader: IterableLoader) -> Any:
    while True:
        yield from loader


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(4, 9), st.integers(0, 20), st.sampled_from([0, 2]))
def test_a_stream_comes_once_in_an_epoch_in_equal_steps(
    size: int, num_ranks: int, batch_size: int, buffer_size: int, prefetch: int
) -> None:
    order = StreamOrder(batch_size=batch_size, num_ranks=num_ranks, buffer_size=buffer_size)
    loaders = [IterableLoader(numbers(size), order, rank=rank, prefetch=prefetch) for rank in range(num_ranks)]
    for epoch in range(2):
        ranks = [list(loader) for loader in loaders]
        assert {len(batches) for batches in ranks} == {-(-size // batch_size)}
        seen = [number for step in zip(*ranks, strict=True) for batch in step for number in shown(batch)]
        expected = [100 * epoch + index for index in range(size)]
        assert sorted(seen) == expected
        assert buffer_size > 1 or seen == expected


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.integers(8, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 20), st.sampled_from(["uneven", "drop"])
)
def test_a_stream_goes_on_exactly_on_any_number_of_ranks(
    size: int, before: int, after: int, done: int, last: Any
) -> None:
    order = StreamOrder(batch_size=5, buffer_size=6, seed=3, last=last)
    undisturbed = endless(IterableLoader(numbers(size), order))
    stopped = IterableLoader(numbers(size), replace(order, num_ranks=before))
    for _ in islice(endless(stopped), done):
        next(undisturbed)
    resumed = [IterableLoader(numbers(size), replace(order, num_ranks=after), rank=rank) for rank in range(after)]
    for loader in resumed:
        loader.load_state(json.loads(json.dumps(stopped.state())))
    streams = [endless(loader) for loader in resumed]
    for _ in range(12):
        assert [number for stream in streams for number in shown(next(stream))] == shown(next(undisturbed))


def test_a_stream_has_an_order_of_its_own_in_each_epoch() -> None:
    loader = IterableLoader(numbers(50), StreamOrder(batch_size=5, buffer_size=25))
    first, second = ([number % 100 for batch in loader for number in shown(batch)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_a_stream_drops_its_last_examples_if_asked() -> None:
    loader = IterableLoader(numbers(11), StreamOrder(batch_size=4, last="drop"))
    assert [shown(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (loader.state()["epoch"], loader.state()["step"]) == (1, 0)


def test_a_buffer_mixes_what_is_near_and_each_epoch_has_an_order_of_its_own() -> None:
    orders = [list(mixed(range(200), 20, generator(0, epoch))) for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(number < place + 20 for place, number in enumerate(orders[0]))
    assert sorted(orders[0]) == list(range(200)) != orders[0]


def test_a_stream_that_is_shorter_than_its_state_says_so() -> None:
    order = StreamOrder(batch_size=4)
    loader = IterableLoader(numbers(8), order)
    loader.load_state(IterableLoader(numbers(8), order).state() | {"step": 2})
    with pytest.raises(ValueError, match="the source ends before step 2 of epoch 0"):
        next(iter(loader))
    with pytest.raises(ValueError, match=r"another order: this is .*'seed': 0.*the state's .*'seed': 1"):
        loader.load_state(IterableLoader(numbers(8), replace(order, seed=1)).state())


def test_arguments_out_of_range_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"rank: must be in 0\.\.0, got 1; prefetch: must not be negative, got -1"):
        IterableLoader(numbers(8), StreamOrder(batch_size=4), rank=1, prefetch=-1)
    with pytest.raises(ValueError, match=r"num_ranks: must be at least 1, got 0; buffer_size: must not be negative"):
        StreamOrder(batch_size=4, num_ranks=0, buffer_size=-1)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_a_stream_surfaces_at_its_own_step(prefetch: int) -> None:
    def source(epoch: int) -> Any:
        yield from ((torch.tensor([float(index)]), index) for index in range(7))
        raise OSError("the line went dead")

    loader = IterableLoader(source, StreamOrder(batch_size=2), prefetch=prefetch)
    batches = iter(loader)
    assert [shown(next(batches)) for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="the line went dead"):
        next(batches)
    assert loader.state()["step"] == 2

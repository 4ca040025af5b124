"""The loader yields the examples of its order, however they are fetched, and resumes exactly from its state."""

import json
import multiprocessing
import sqlite3
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from atoll.parallel.data.batch import Batch, count_units
from atoll.parallel.data.loader import Loader
from atoll.parallel.data.order import Order
from tests.waiting import BOUND_S


class Numbers:
    """Examples (i, 10 i) that are read one by one."""

    def __init__(self, size: int, *, broken: frozenset[int] = frozenset()) -> None:
        self.size, self.broken = size, set(broken)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.broken:
            raise OSError(f"example {index} cannot be read")
        return torch.tensor([float(index)]), 10 * index


FETCHERS = [{}, {"prefetch": 3}]
"""Fetching without and with a thread; worker processes have tests of their own, since they take long to start."""


def examples(batch: Batch) -> list[int]:
    """Return the examples that count."""
    return [int(value) for value in batch.inputs.flatten().tolist()][: batch.count]


def endless(loader: Loader) -> Any:
    while True:
        yield from loader


@pytest.mark.real
@pytest.mark.parametrize("how", [*FETCHERS, {"num_workers": 2}])
def test_batches_are_those_of_the_order_in_every_epoch(how: dict[str, int]) -> None:
    order = Order(num_examples=23, batch_size=6, num_ranks=2, seed=3)
    loader = Loader(Numbers(23), order, rank=1, **how)
    for epoch in range(3):
        indices = order.steps(epoch, 1)
        batches = list(loader)
        assert loader.epoch == epoch
        assert len(batches) == len(loader) == loader.step == 4
        for step, batch in enumerate(batches):
            assert examples(batch) == indices(step).tolist()
            assert batch.targets.tolist() == [10 * index for index in indices(step)]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from(["global", "partition"]),
    st.integers(0, 25),
    st.sampled_from(FETCHERS),
)
def test_a_resumed_loader_continues_with_the_very_next_example(
    size: int, num_ranks: int, sampling: Any, done: int, how: dict[str, int]
) -> None:
    order = Order(num_examples=size, batch_size=2 * num_ranks, num_ranks=num_ranks, sampling=sampling, seed=7)
    for rank in range(num_ranks):
        undisturbed = endless(Loader(Numbers(size), order, rank=rank))
        stopped = Loader(Numbers(size), order, rank=rank, **how)
        for _ in islice(endless(stopped), done):
            next(undisturbed)
        resumed = Loader(Numbers(size), order, rank=rank, **how)
        resumed.load_state(json.loads(json.dumps(stopped.state())))
        for batch in islice(endless(resumed), 12):
            expected = next(undisturbed)
            assert torch.equal(batch.inputs, expected.inputs)
            assert batch.count == expected.count


@pytest.mark.real
@pytest.mark.parametrize("how", [*FETCHERS, {"num_workers": 1}])
def test_the_state_is_that_of_what_was_handed_out_not_of_what_was_fetched(how: dict[str, int]) -> None:
    loader = Loader(Numbers(20), Order(num_examples=20, batch_size=2), **how)
    batches = iter(loader)
    assert (loader.state()["epoch"], loader.state()["step"]) == (0, 0)
    for step in range(1, 4):
        next(batches)
        assert (loader.state()["epoch"], loader.state()["step"]) == (0, step)


def flat(lists: list[list[int]]) -> list[int]:
    return [example for one in lists for example in one]


def run(loaders: list[Loader], num_steps: int) -> list[list[int]]:
    """The global batches of the next steps."""
    streams = [endless(loader) for loader in loaders]
    return [[example for stream in streams for example in examples(next(stream))] for _ in range(num_steps)]


def ranks(order: Order, state: dict[str, Any] | None = None) -> list[Loader]:
    loaders = [Loader(Numbers(order.num_examples), order, rank=rank) for rank in range(order.num_ranks)]
    for loader in loaders:
        if state is not None:
            loader.load_state(state)
    return loaders


@pytest.mark.parametrize("others", [1, 2, 3, 8])
def test_other_ranks_continue_the_same_global_order_without_end(others: int) -> None:
    order = Order(num_examples=50, batch_size=8, num_ranks=4, seed=5)
    four = ranks(order)
    run(four, 3)
    now = replace(order, num_ranks=others)
    assert run(ranks(now, four[0].state()), 20) == run(four, 20)


@pytest.mark.parametrize("others", [1, 2, 8])
def test_other_ranks_finish_the_epoch_of_the_old_parts_and_then_cut_their_own(others: int) -> None:
    order = Order(num_examples=50, batch_size=8, num_ranks=4, seed=5, sampling="partition")
    four = ranks(order)
    begun = run(four, 3)
    now = replace(order, num_ranks=others)
    continued = ranks(now, four[0].state())
    assert (rest := run(continued, 4)) == run(four, 4)
    assert sorted(flat(begun + rest)) == list(range(50))
    assert run(continued, 7) == [
        [example for rank in range(others) for example in now.steps(1, rank)(step)[: now.counts(step)[rank]]]
        for step in range(7)
    ]


def test_from_the_next_epoch_on_the_state_is_that_of_the_ranks_of_today() -> None:
    order = Order(num_examples=50, batch_size=8, num_ranks=4, sampling="partition")
    four = ranks(order)
    two = ranks(replace(order, num_ranks=2), four[0].state())
    assert two[0].state()["num_ranks"] == 4
    run(two, 9)
    assert two[0].state()["num_ranks"] == 2
    assert run(ranks(replace(order, num_ranks=2), two[0].state()), 9) == run(two, 9)


def test_a_second_change_of_ranks_within_an_epoch_keeps_its_batches_too() -> None:
    order = Order(num_examples=60, batch_size=6, num_ranks=3, sampling="partition")
    three = ranks(order)
    run(three, 2)
    two = ranks(replace(order, num_ranks=2), three[0].state())
    assert run(two, 3) == run(three, 3)
    assert run(ranks(replace(order, num_ranks=6), two[1].state()), 5) == run(three, 5)


def test_a_rank_without_data_gets_a_filler_that_counts_nothing() -> None:
    order = Order(num_examples=9, batch_size=4, num_ranks=4, sampling="partition")
    counts = [[batch.count for batch in loader] for loader in ranks(order)]
    assert [sum(step) for step in zip(*counts, strict=True)] == [4, 4, 1]
    assert sorted(rank[-1] for rank in counts) == [0, 0, 0, 1]
    [filler, *_] = [batch for loader in ranks(order) for batch in loader if batch.count == 0]
    assert filler.inputs.shape == (1, 1)


@pytest.mark.parametrize("how", FETCHERS)
def test_an_error_surfaces_at_its_own_step_and_is_tried_again(how: dict[str, int]) -> None:
    data = Numbers(10, broken=frozenset({5}))
    loader = Loader(data, Order(num_examples=10, batch_size=2, shuffle=False), **how)
    assert [examples(batch) for batch in islice(loader, 2)] == [[0, 1], [2, 3]]
    for _ in range(2):
        with pytest.raises(OSError, match="example 5 cannot be read"):
            next(iter(loader))
    assert loader.state()["step"] == 2
    data.broken.clear()
    assert [examples(batch) for batch in loader] == [[4, 5], [6, 7], [8, 9]]


@pytest.mark.real
def test_an_error_of_a_worker_process_surfaces_at_its_own_step_and_ends_the_process() -> None:
    order = Order(num_examples=10, batch_size=2, shuffle=False)
    loader = Loader(Numbers(10, broken=frozenset({5})), order, num_workers=1)
    before = set(multiprocessing.active_children())
    assert [examples(batch) for batch in islice(loader, 2)] == [[0, 1], [2, 3]]
    assert len(multiprocessing.active_children()) == len(before) + 1
    with pytest.raises(OSError, match="example 5 cannot be read"):
        next(iter(loader))
    assert loader.state()["step"] == 2
    assert set(multiprocessing.active_children()) == before


class Table:
    """Rows (i, 10 i) of a database that is opened at the first row, as worker processes need it."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.database: sqlite3.Connection | None = None
        with sqlite3.connect(path) as database:
            database.execute("create table r (i integer primary key, y integer)")
            database.executemany("insert into r values (?, ?)", [(i, 10 * i) for i in range(size)])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.database is None:
            self.database = sqlite3.connect(self.path)
        x, y = self.database.execute("select i, y from r where i = ?", (index,)).fetchone()
        return torch.tensor([float(x)]), y


@pytest.mark.parametrize("is_read_before", [False, True])
def test_rows_of_a_database_are_read_in_one_thread(
    is_read_before: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Table(tmp_path / "rows.db", 10)
    if is_read_before:
        assert data[3][1] == 30, "here, as a checksum of the rows does"
    loader = Loader(data, Order(num_examples=10, batch_size=4, shuffle=False), prefetch=2)
    for _ in range(2):
        assert [examples(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    said = [record.message for record in caplog.records]
    assert [sentence.startswith("rows are read when their step needs them") for sentence in said] == (
        [True] * is_read_before
    )
    assert not is_read_before or "ProgrammingError: SQLite objects created in a thread" in said[0]


@pytest.mark.real
def test_worker_processes_do_not_share_the_place_in_a_file_that_was_read_before(tmp_path: Path) -> None:
    data = Slow(tmp_path / "rows", 64)
    assert data[3][1] == 30
    loader = Loader(data, Order(num_examples=64, batch_size=4, shuffle=False), num_workers=2)
    assert flat([examples(batch) for batch in loader]) == [*range(64)]
    assert data[5][1] == 50
    data.file.close()


class Slow(Numbers):
    """Rows of a file that is opened at the first row, and read slowly."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(size)
        path.write_bytes(bytes(range(size)))
        self.path, self.file = path, cast("Any", None)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.file = self.file or self.path.open("rb", buffering=0)
        self.file.seek(index)
        time.sleep(0.001)
        return super().__getitem__(self.file.read(1)[0])


def test_breaking_off_goes_on_later_with_the_rest_of_the_epoch() -> None:
    loader = Loader(Numbers(10), Order(num_examples=10, batch_size=2, shuffle=False), prefetch=2)
    assert [examples(batch) for batch in islice(loader, 2)] == [[0, 1], [2, 3]]
    assert [examples(batch) for batch in loader] == [[4, 5], [6, 7], [8, 9]]
    assert loader.state()["epoch"] == 0
    assert examples(next(iter(loader))) == [0, 1]
    assert loader.state()["epoch"] == 1


def test_a_thread_fetches_as_far_ahead_as_it_was_told_and_ends_with_the_loader() -> None:
    fetched = threading.Semaphore(0)

    class Watched(Numbers):
        def __getitem__(self, index: int) -> Any:
            fetched.release()
            return super().__getitem__(index)

    before = threading.active_count()
    loader = Loader(Watched(100), Order(num_examples=100, batch_size=1), prefetch=3)
    batches = iter(loader)
    next(batches)
    assert all(fetched.acquire(timeout=BOUND_S) for _ in range(4))
    assert not fetched.acquire(timeout=0.05)
    assert threading.active_count() == before + 1
    batches.close()
    del batches, loader
    assert threading.active_count() == before


@pytest.mark.real
def test_fetching_draws_nothing_from_the_models_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    for how in ({}, {"prefetch": 2}, {"num_workers": 1}):
        torch.manual_seed(0)
        next(iter(Loader(Numbers(10), Order(num_examples=10, batch_size=2), **how)))
        assert torch.equal(torch.rand(1), expected)


def test_a_state_of_another_order_is_refused_with_all_differences() -> None:
    order = Order(num_examples=10, batch_size=2)
    state = Loader(Numbers(10), order).state()
    other = Loader(Numbers(12), replace(order, num_examples=12, seed=4, shards=(6, 6)))
    with pytest.raises(ValueError, match=r"num_examples is 12, in the state 10; seed is 4, in the state 0; shards is"):
        other.load_state(state)
    with pytest.raises(ValueError, match="at step 6 of an epoch of 5"):
        Loader(Numbers(10), order).load_state(state | {"step": 6})
    with pytest.raises(ValueError, match="not a loader's: epoch 0, step 'first'"):
        Loader(Numbers(10), order).load_state(state | {"step": "first"})
    with pytest.raises(ValueError, match="num_examples is 10, in the state None"):
        Loader(Numbers(10), order).load_state({})


def test_a_loader_that_cannot_be_names_why() -> None:
    with pytest.raises(
        ValueError, match=r"dataset: must have the order's 10 examples, got 9; rank: must be in 0..1, got 2"
    ):
        Loader(Numbers(9), Order(num_examples=10, batch_size=2, num_ranks=2), rank=2)


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (torch.tensor([3, 1, 2]), 3),
        (torch.tensor([[3, -100], [-100, -100]]), 1),
        (torch.zeros(4, 7), 4),
        (torch.zeros(5, 2, dtype=torch.bool), 5),
        ({"boxes": torch.zeros(6, 4), "classes": torch.zeros(6, dtype=torch.long)}, 6),
        ((torch.zeros(2, dtype=torch.long),), 2),
    ],
)
def test_units_are_what_a_mean_loss_averages_over(targets: Any, count: int) -> None:
    assert count_units(targets) == count


def test_targets_without_a_tensor_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match="no tensor among the targets to count, got str"):
        count_units("label")


def test_trees_of_tensors_stay_trees() -> None:
    data = TensorDataset(torch.arange(6.0), torch.arange(6))
    loader = Loader(data, Order(num_examples=6, batch_size=6, shuffle=False), device="meta")
    [batch] = loader
    assert (batch.inputs.device.type, batch.targets.device.type, batch.count) == ("meta", "meta", 6)
    moved = Batch({"a": [torch.zeros(2), torch.ones(2)]}, (torch.zeros(2), "as it is"), 2).to("meta")
    assert moved.inputs["a"][1].device.type == moved.targets[0].device.type == "meta"
    assert moved.targets[1] == "as it is"

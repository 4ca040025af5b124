"""The order's promises for any number of examples, ranks and batch size; plain lists and sets are the oracle."""

import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.parallel.data.order import Order
from atoll.training.data.batches import batch_sizes

MODEL_WITH_BATCHNORM = nn.BatchNorm1d(1)


@st.composite
def orders(draw: st.DrawFn, **fixed: Any) -> Order:
    num_ranks = draw(st.integers(1, 6))
    batch_size = draw(st.integers(num_ranks, 24))
    sampling = fixed.get("sampling") or draw(st.sampled_from(["global", "partition"]))
    last = fixed.get("last") or draw(st.sampled_from(["uneven", "drop", "wrap"]))
    sizes = [*draw(st.lists(st.integers(0, 30), max_size=5)), draw(st.integers(1, 30))]
    if sum(sizes) < batch_size and (last == "drop" or (last, sampling) == ("wrap", "partition")):
        sizes.append(batch_size)  # these want a global batch at least
    return Order(
        num_examples=sum(sizes),
        batch_size=batch_size,
        num_ranks=num_ranks,
        sampling=sampling,
        shuffle=fixed.get("shuffle", draw(st.booleans())),
        seed=draw(st.integers(0, 2**40)),
        last=last,
        shards=tuple(sizes) if draw(st.booleans()) else (),
        open_shards=draw(st.integers(1, 3)),
    )


def given_out(order: Order, epoch: int, num_ranks: int | None = None) -> list[list[list[int]]]:
    """Return the examples by step and rank, without fillers."""
    ranks = num_ranks or order.num_ranks
    views = [order.steps(epoch, rank, num_ranks) for rank in range(ranks)]
    counts = [order.counts(step, num_ranks) for step in range(order.num_steps)]
    return [[views[rank](step)[: counts[step][rank]].tolist() for rank in range(ranks)] for step in range(len(counts))]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [example for step in steps for rank in step for example in rank]


@settings(deadline=None)
@given(orders(last="uneven"), st.integers(0, 3))
def test_every_example_comes_exactly_once_in_an_epoch(order: Order, epoch: int) -> None:
    assert sorted(flat(given_out(order, epoch))) == list(range(order.num_examples))


@settings(deadline=None)
@given(orders(last="drop"), st.integers(0, 3))
def test_drop_leaves_out_less_than_a_global_batch_and_repeats_nothing(order: Order, epoch: int) -> None:
    seen = flat(given_out(order, epoch))
    assert len(set(seen)) == len(seen) == order.num_examples // order.batch_size * order.batch_size


@settings(deadline=None)
@given(orders(last="wrap"), st.integers(0, 3))
def test_wrap_gives_full_batches_with_every_example_and_the_fewest_repeats(order: Order, epoch: int) -> None:
    seen = Counter(flat(given_out(order, epoch)))
    assert set(seen) == set(range(order.num_examples))
    assert sum(seen.values()) == -(-order.num_examples // order.batch_size) * order.batch_size
    if order.sampling == "global":
        assert max(seen.values()) - min(seen.values()) <= 1


@settings(deadline=None)
@given(orders(), st.integers(0, 3))
def test_every_rank_gets_its_count_in_every_step_and_a_filler_for_none(order: Order, epoch: int) -> None:
    for rank in range(order.num_ranks):
        indices = order.steps(epoch, rank)
        for step in range(order.num_steps):
            got = indices(step)
            assert len(got) == max(1, order.counts(step)[rank])
            assert all(0 <= example < order.num_examples for example in got)


@settings(deadline=None)
@given(orders())
def test_a_step_is_split_as_evenly_as_possible(order: Order) -> None:
    for step in range(order.num_steps):
        counts = order.counts(step)
        assert sum(counts) == order.size(step)
        assert max(counts) - min(counts) <= 1


@settings(deadline=None)
@given(orders(), st.integers(1, 6))
def test_the_grid_depends_on_neither_the_ranks_nor_the_sampling(order: Order, num_ranks: int) -> None:
    assume(num_ranks <= order.batch_size)
    assume(order.num_examples >= order.batch_size)
    other = replace(order, num_ranks=num_ranks, sampling="global" if order.sampling == "partition" else "partition")
    assert other.num_steps == order.num_steps
    assert [other.size(s) for s in range(other.num_steps)] == [order.size(s) for s in range(order.num_steps)]


@settings(deadline=None)
@given(orders(), st.integers(0, 3), st.integers(1, 6))
def test_other_ranks_get_the_same_global_batches_in_the_same_order(order: Order, epoch: int, num_ranks: int) -> None:
    assume(num_ranks <= order.batch_size)
    before, after = given_out(order, epoch), given_out(order, epoch, num_ranks)
    assert [flat([step]) for step in after] == [flat([step]) for step in before]


@settings(deadline=None)
@given(orders(sampling="global"), st.integers(0, 3), st.integers(1, 6))
def test_the_global_order_knows_nothing_of_the_ranks(order: Order, epoch: int, num_ranks: int) -> None:
    assume(num_ranks <= order.batch_size)
    assert flat(given_out(replace(order, num_ranks=num_ranks), epoch)) == flat(given_out(order, epoch))


@settings(deadline=None)
@given(orders(sampling="partition", last="uneven"))
def test_with_partition_a_rank_keeps_its_part_in_every_epoch(order: Order) -> None:
    parts = [
        [sorted(flat([[step[r]] for step in given_out(order, e)])) for e in (0, 1)] for r in range(order.num_ranks)
    ]
    assert all(first == second for first, second in parts)


def test_each_part_is_permuted_in_its_own_way() -> None:
    order = Order(num_examples=40, batch_size=4, num_ranks=2, sampling="partition")
    changes = []
    for rank in range(2):
        first, second = ([int(i) for step in range(10) for i in order.steps(epoch, rank)(step)] for epoch in (0, 1))
        changes.append([first.index(example) for example in second])
    assert changes[0] != changes[1]


@pytest.mark.parametrize("sampling", ["global", "partition"])
@pytest.mark.parametrize("shards", [(), (50,) * 4])
def test_each_epoch_and_each_seed_has_an_order_of_its_own(sampling: Any, shards: tuple[int, ...]) -> None:
    order = Order(num_examples=200, batch_size=8, num_ranks=2, sampling=sampling, shards=shards)
    seen = [flat(given_out(order, epoch)) for epoch in range(3)] + [flat(given_out(replace(order, seed=1), 0))]
    assert len({tuple(one) for one in seen}) == 4
    assert given_out(order, 1) == given_out(replace(order), 1)


@settings(deadline=None)
@given(orders(shuffle=False, last="uneven", sampling="global"))
def test_without_shuffle_the_order_is_the_data_sets(order: Order) -> None:
    assert flat(given_out(order, 2)) == list(range(order.num_examples))


def test_the_two_samplings_differ() -> None:
    order = Order(num_examples=100, batch_size=10, num_ranks=2)
    assert flat(given_out(order, 0)) != flat(given_out(replace(order, sampling="partition"), 0))


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20))
def test_on_one_rank_the_sizes_are_those_of_a_client_with_batchnorm(num_examples: int, batch_size: int) -> None:
    assume(batch_size > 1)
    order = Order(num_examples=num_examples, batch_size=batch_size, last_min=2)
    sizes = [order.size(step) for step in range(order.num_steps)]
    assert sizes == batch_sizes(num_examples, batch_size, model=MODEL_WITH_BATCHNORM)


@settings(deadline=None)
@given(orders(last="uneven"))
def test_a_last_minimum_of_two_per_rank_leaves_no_rank_with_one(order: Order) -> None:
    ranks = order.num_ranks
    assume(order.num_examples >= 2 * ranks and order.batch_size >= 2 * ranks)
    order = replace(order, last_min=2 * ranks)
    assert min(min(order.counts(step)) for step in range(order.num_steps)) >= 2
    assert sorted(flat(given_out(order, 0))) == list(range(order.num_examples))


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(0, 5))
def test_shards_are_read_a_few_at_a_time(open_shards: int, epoch: int) -> None:
    sizes = (7, 0, 12, 5, 9, 30, 1, 11)
    order = Order(num_examples=75, batch_size=5, shards=sizes, open_shards=open_shards)
    owner = [shard for shard, size in enumerate(sizes) for _ in range(size)]
    shards = [owner[example] for example in flat(given_out(order, epoch))]
    spans = [(shards.index(s), len(shards) - shards[::-1].index(s)) for s in set(shards)]
    assert max(sum(start <= at < stop for start, stop in spans) for at in range(75)) <= open_shards


def test_with_partition_a_shard_belongs_to_one_rank_but_for_those_at_the_cuts() -> None:
    order = Order(num_examples=400, batch_size=16, num_ranks=4, sampling="partition", shards=(10,) * 40)
    steps = given_out(order, 0)
    owners = [{example // 10 for step in steps for example in step[rank]} for rank in range(4)]
    assert sum(len(shards) for shards in owners) <= 40 + 3
    assert all(len(shards) <= 11 for shards in owners)


@pytest.mark.slow
def test_the_order_of_a_billion_examples_in_shards_takes_the_memory_of_the_open_ones() -> None:
    order = Order(num_examples=10**9, batch_size=1024, num_ranks=4, shards=(10**5,) * 10**4, open_shards=2)
    tracemalloc.start()
    try:
        indices = order.steps(3, rank=1)
        seen = [indices(step) for step in (0, 500_000, order.num_steps - 1)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [len(one) for one in seen] == [256, 256, 128]
    assert peak < 30_000_000


@pytest.mark.slow
def test_all_permutations_of_a_few_examples_are_equally_likely() -> None:
    for order in (Order(num_examples=3, batch_size=3), Order(num_examples=3, batch_size=3, shards=(1, 1, 1))):
        seen = Counter(tuple(flat(given_out(order, epoch))) for epoch in range(1200))
        expected = 1200 / 6
        chi_squared = sum((count - expected) ** 2 / expected for count in seen.values())
        assert len(seen) == 6
        assert chi_squared < 20.5  # 0.1 % of the chi-squared distribution of 5 degrees of freedom


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"batch_size: must be at least the 4 ranks, got 2; .*seed: .*-1.*shards: .*7"):
        Order(num_examples=7, batch_size=2, num_ranks=4, seed=-1, shards=(3, 3))
    with pytest.raises(ValueError, match="last: leaves no step: 7 examples are no global batch of 8"):
        Order(num_examples=7, batch_size=8, last="drop")
    with pytest.raises(ValueError, match="last: cannot fill parts of 7 examples"):
        Order(num_examples=7, batch_size=8, num_ranks=2, last="wrap", sampling="partition")
    with pytest.raises(ValueError, match="sampling: must be one of global, partition, got 'local'"):
        Order(num_examples=7, batch_size=8, sampling="local")  # type: ignore[arg-type]

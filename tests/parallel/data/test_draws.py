"""The loaders give each example the random numbers of its seed, epoch and index, however it is fetched."""

from itertools import islice
from typing import Any

import pytest
import torch

from atoll.parallel.data.loader import Loader
from atoll.parallel.data.order import Order
from examples.datasets.iterable import IterableLoader, StreamOrder
from tests.training.drawing import Noisy, expected, stream

WAYS = [{}, {"prefetch": 2}, {"num_workers": 1}, {"num_workers": 2, "prefetch": 2}]


def rows(batches: Any) -> list[list[float]]:
    """Return the examples of batches, while a model draws from the same generators."""
    found = []
    for batch in batches:
        torch.rand(7)
        assert torch.equal(batch.inputs, batch.targets)
        found += batch.inputs.tolist()
    return found


@pytest.mark.real
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_prefetch_and_worker_draws_by_seed_epoch_and_index(how: dict[str, int], num_ranks: int) -> None:
    order = Order(num_examples=24, batch_size=8, num_ranks=num_ranks, seed=3)
    for rank in range(num_ranks):
        loader = Loader(Noisy(), order, rank=rank, **how)
        for epoch in range(2):
            found = rows(loader)
            assert found == [expected(3, epoch, int(row[0])) for row in found]


@pytest.mark.real
@pytest.mark.parametrize("how", WAYS)
def test_a_resumed_loader_draws_what_the_undisturbed_one_draws(how: dict[str, int]) -> None:
    order = Order(num_examples=24, batch_size=8, seed=3)
    undisturbed = rows(Loader(Noisy(), order))
    stopped = Loader(Noisy(), order, **how)
    first = rows(islice(stopped, 1))
    resumed = Loader(Noisy(), order, **how)
    resumed.load_state(stopped.state())
    assert first + rows(resumed) == undisturbed


def test_the_models_draws_are_those_without_any_data_even_if_the_first_draw_comes_late() -> None:
    """Two threads may not share a generator: the thread ends before the first draw of the data set."""
    torch.manual_seed(4)
    alone = [torch.rand(7) for _ in range(6)]
    torch.manual_seed(4)
    order = Order(num_examples=24, batch_size=4, shuffle=False, seed=3)
    drawn, found = [], []
    for batch in Loader(Noisy(first=13), order, prefetch=2):
        drawn.append(torch.rand(7))
        found += batch.inputs.tolist()
    assert all(map(torch.equal, drawn, alone))
    assert found[13:] == [expected(3, 0, index) for index in range(13, 24)]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stream_draws_by_seed_epoch_and_the_number_of_its_example(prefetch: int, num_ranks: int) -> None:
    order = StreamOrder(batch_size=8, num_ranks=num_ranks, seed=3)
    for rank in range(num_ranks):
        loader = IterableLoader(stream, order, rank=rank, prefetch=prefetch)
        for epoch in range(2):
            found = rows(loader)
            assert found == [expected(3, epoch, int(row[0])) for row in found]
        resumed = IterableLoader(stream, order, rank=rank, prefetch=prefetch)
        resumed.load_state({**order.described, "epoch": 1, "step": 2})
        assert rows(resumed) == found[-24 // 3 // num_ranks :]

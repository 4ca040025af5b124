"""Real ranks with uneven data: no rank waits forever, and the weighted gradients are those of the union."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from atoll.parallel.data.loader import Loader
from atoll.parallel.data.order import Order
from tests.parallel.ranks import call_on_ranks

NUM_EXAMPLES, BATCH_SIZE, EPOCHS, LR = 9, 4, 2, 0.5

Losses = list[float]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_EXAMPLES, 6, 3, generator=generator)
    targets = torch.randint(0, 5, (NUM_EXAMPLES, 6), generator=generator)
    targets[:, 2:][torch.rand(NUM_EXAMPLES, 4, generator=generator) < 0.5] = -100  # unequal tokens per example
    return inputs, targets


def model() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Linear(3, 5).double()


def alone() -> tuple[Losses, list[float]]:
    """A plain loop over the data in its own order, four at a time."""
    net, (inputs, targets) = model(), data()
    losses = []
    for _ in range(EPOCHS):
        for start in range(0, NUM_EXAMPLES, BATCH_SIZE):
            outputs = net(inputs[start : start + BATCH_SIZE].double())
            loss = F.cross_entropy(outputs.flatten(0, 1), targets[start : start + BATCH_SIZE].flatten())
            losses.append(loss.item())
            step(net, loss, is_shared=False)
    return losses, weights_of(net)


def together(order: Order) -> tuple[Losses, list[float], list[int]]:
    net = model()
    loader = Loader(TensorDataset(*data()), order, rank=dist.get_rank(), prefetch=2)
    losses, counts = [], []
    for _ in range(EPOCHS):
        for batch in loader:
            total = torch.tensor(float(batch.count))
            dist.all_reduce(total)
            mean = F.cross_entropy(net(batch.inputs.double()).flatten(0, 1), batch.targets.flatten())
            loss = mean * batch.count / total
            step(net, loss, is_shared=True)
            whole = loss.detach()
            dist.all_reduce(whole)
            losses.append(whole.item())
            counts.append(batch.count)
    return losses, weights_of(net), counts


def weights_of(net: torch.nn.Module) -> list[float]:
    return [value for parameter in net.parameters() for value in parameter.flatten().tolist()]


def step(net: torch.nn.Module, loss: torch.Tensor, *, is_shared: bool) -> None:
    net.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in net.parameters():
            assert parameter.grad is not None
            if is_shared:
                dist.all_reduce(parameter.grad)
            parameter -= LR * parameter.grad


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_with_uneven_data_take_the_steps_of_one_process(num_ranks: int) -> None:
    order = Order(num_examples=NUM_EXAMPLES, batch_size=BATCH_SIZE, num_ranks=num_ranks, shuffle=False)
    losses, weights = alone()
    results: list[Any] = call_on_ranks(together, num_ranks, order)
    assert sum(counts.count(0) for _, _, counts in results) == EPOCHS * (num_ranks - 1)
    for found, parameters, _ in results:
        assert found == pytest.approx(losses, rel=1e-12)
        assert parameters == pytest.approx(weights, rel=1e-12)


def test_uneven_parts_end_together() -> None:
    order = Order(num_examples=NUM_EXAMPLES, batch_size=BATCH_SIZE, num_ranks=3, sampling="partition", seed=4)
    results: list[Any] = call_on_ranks(together, 3, order)
    assert {len(losses) for losses, _, _ in results} == {EPOCHS * 3}
    tokens = int((data()[1] != -100).sum())
    assert sum(sum(counts) for _, _, counts in results) == EPOCHS * tokens

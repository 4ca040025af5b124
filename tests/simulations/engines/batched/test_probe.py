from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll.simulations.engines.batched import probe
from atoll.simulations.engines.batched.batched import Batched
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.engine import Training
from tests.simulations.engines.cases import SIZES, Case, mlp, vectors


class Counter(nn.Module):
    """A model that counts its examples in a buffer that no optimizer moves."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 0.01 * len(x) if self.seen.is_floating_point() else len(x)  # type: ignore[has-type]
        y: torch.Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_model_whose_buffers_move_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(
        CannotBatch, match="stacked: seen changes while a client trains, although no optimizer updates it"
    ):
        Batched(Case("counter", model=lambda: Counter(dtype)).training())


class Mixing(nn.Module):
    """A model whose examples influence each other.

    Args:
        of: (whole batch) -> a number.
    """

    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.of = mlp(), of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x / self.of(x))
        return y


def alike(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make examples whose largest number, and whose first one, is the same in every batch of every client."""
    inputs, targets = vectors(count, seed)
    return torch.cat([torch.ones(count, 1), inputs[:, 1:].clamp(-1, 1)], 1), targets


@pytest.mark.parametrize("batch_size", [4, 8, 16])
@pytest.mark.parametrize(
    "of", [lambda x: x.abs().amax(), lambda x: x.std(), lambda x: 1 + x[:, 0].mean(), lambda x: x[:, 0].max()]
)
def test_examples_that_see_each_other_are_refused_also_where_clients_are_alike(
    of: Callable[[torch.Tensor], torch.Tensor], batch_size: int
) -> None:
    case = Case("mixing", model=lambda: Mixing(of), examples=alike, local={"batch_size": batch_size})
    for kind in ("stacked", "mapped"):
        with pytest.raises(CannotBatch, match=rf"{kind}: the update of \w is .* off, relative to its length"):
            Batched(case.training())


@pytest.mark.parametrize("of", [lambda x: x.amax().clamp(min=50.0), lambda x: (-x.amin()).clamp(min=50.0)])
def test_clients_that_see_each_other_beyond_a_threshold_are_refused(
    of: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threshold is far beyond all inputs of the clients that are tried."""
    training = Case("mixing", model=lambda: Mixing(of)).training()
    assert Batched(training).kind == "mapped"  # in which each client has its own
    monkeypatch.setattr(probe, "KINDS", ("stacked",))
    with pytest.raises(CannotBatch, match=r"stacked: the inputs of \w influence others: the update of \w is .* off"):
        Batched(training)


def with_factors(factors: dict[str, float], model: Callable[[], nn.Module]) -> Training:
    """Return the training of `Case("mlp")` with some clients' inputs times a number."""

    def data(site: str, split: str) -> TensorDataset:
        inputs, targets = vectors(SIZES[site], SIZES[site])
        return TensorDataset(inputs * factors.get(site, 1), targets)

    case = Case("factors", model=model)
    return replace(case.training(), task=replace(case.task(), data=data))


def test_clients_that_fail_both_ways_tell_nothing_so_others_are_tried() -> None:
    broken = dict.fromkeys("abc", np.nan)
    with pytest.raises(CannotBatch, match=r"the update of [de] is .* off"):
        Batched(with_factors(broken, lambda: Mixing(lambda x: 1 + x.mean())))
    assert Batched(with_factors(broken, mlp)).kind == "stacked"
    first_four = broken | {"d": np.nan}
    assert Batched(with_factors(first_four, mlp)).kind == "stacked"


def test_where_every_client_fails_there_is_nothing_to_compare() -> None:
    with pytest.raises(CannotBatch, match="every tried client diverges to NaN or infinity"):
        Batched(with_factors(dict.fromkeys(SIZES, np.nan), mlp))


def test_a_client_that_fails_in_one_way_only_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fragile(nn.Module):
        """A model in which a NaN in one example makes the whole batch NaN."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layers(x + 0 * x.sum())
            return y

    training = with_factors({"b": np.nan}, Fragile)
    assert Batched(training).kind == "mapped"
    monkeypatch.setattr(probe, "KINDS", ("stacked",))
    with pytest.raises(CannotBatch, match=r"stacked: d diverges to NaN or infinity only in the group"):
        Batched(training)


class LooksUp(nn.Module):
    """A model that takes its inputs as indices of a hundred words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(100, 4), nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(self.words(x.abs().long()).flatten(1))
        return y


def test_a_model_that_no_loud_inputs_can_be_given_to_is_tried_without() -> None:
    def words(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = vectors(count, seed)
        return inputs.clamp(-4, 4).round(), targets

    engine = Batched(Case("words", model=LooksUp, examples=words).training())
    assert engine.kind == "stacked"

"""The factors of a layer's change, against the weights that they replace."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import Local
from atoll.simulations.engines.batched import factors
from atoll.simulations.engines.batched import trainer as batched
from atoll.simulations.engines.batched.chain import Chain
from atoll.simulations.engines.batched.factors import Factors, pay
from atoll.simulations.engines.batched.stack import Stack
from atoll.simulations.engines.batched.trainer import BatchTrainer
from atoll.simulations.engines.rows import Columns
from atoll.tensors.layout import Tensor
from tests.simulations.engines.cases import Case, wide_chain


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    steps=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=5),
    spare=st.integers(0, 2),
)
def test_they_are_the_weights_after_every_step(
    seed: int, shape: tuple[int, int], steps: list[tuple[int, int]], spare: int
) -> None:
    """Make steps of (clients, examples of each), with the most clients first, as in a schedule."""
    steps = sorted(steps, key=lambda step: -step[0])
    generator, (out, into), clients, lr = np.random.default_rng(seed), shape, steps[0][0], 0.3
    start = generator.standard_normal(shape)
    layer = Factors(shape, lr, "cpu")
    for _ in range(2):  # the second cohort finds what the first has left
        weights = np.stack([start] * clients)
        layer.begin(torch.from_numpy(start), clients, sum(n for _, n in steps) + spare)
        for m, n in steps:
            x, delta = generator.standard_normal((m, n, into)), generator.standard_normal((m, n, out))
            forward, backward = layer.forward(torch.from_numpy(x)), layer.backward(torch.from_numpy(delta))
            np.testing.assert_allclose(forward, x @ weights[:m].transpose(0, 2, 1), atol=1e-11)
            np.testing.assert_allclose(backward, delta @ weights[:m], atol=1e-11)
            layer.add(torch.from_numpy(delta), torch.from_numpy(x))
            weights[:m] -= lr * delta.transpose(0, 2, 1) @ x
        np.testing.assert_allclose(torch.stack(list(layer.moved())), weights - start, atol=1e-11)


def test_what_one_client_has_left_behind_reaches_no_other() -> None:
    layer, start = Factors((3, 2), 0.1, "cpu"), torch.zeros(3, 2)
    layer.begin(start, 2, 2)
    for _ in range(2):
        layer.add(torch.full((2, 1, 3), torch.nan), torch.full((2, 1, 2), torch.inf))
    layer.begin(start, 2, 2)
    layer.add(torch.ones(2, 1, 3), torch.ones(2, 1, 2))
    layer.add(torch.ones(1, 1, 3), torch.ones(1, 1, 2))  # the second client has had its only step
    first, second = layer.moved()
    torch.testing.assert_close(first, torch.full((3, 2), -0.2))
    torch.testing.assert_close(second, torch.full((3, 2), -0.1))


def test_they_are_taken_where_they_are_smaller_than_the_weights() -> None:
    assert pay((200, 784), 60)
    assert pay((160, 160), 80)
    assert not pay((160, 160), 81)
    assert not pay((32, 64), 1)  # too small a layer
    assert not pay((64, 32, 5, 5), 1)  # no linear one


OTHERS: dict[str, dict[str, Any]] = {
    "momentum": {"local": {"momentum": 0.9}},
    "clipped": {"local": {"clip_norm": 1.0}},
    "decay": {"local": {"weight_decay": 0.1}},
    "fedprox": {"local": {"prox_mu": 0.1}},
    "adam": {"local": {"optimizer": "adam"}},
    "corrected": {"is_corrected": True},
    "weights of their own": {"starts": 3},
    "many examples": {"length": 81},
}


def factored(
    local: Mapping[str, Any] | None = None, *, is_corrected: bool = False, starts: int = 1, length: int = 80
) -> set[str]:
    """Return the layers of a chain that are stored as factors."""
    model = wide_chain()
    layout = [Tensor(name, "F32", tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    places = Columns(tuple(layout)).places
    stack, width = Stack(Local(**local or {}), places, 3, "cpu"), places[-1][1].stop
    Chain(model, stack)
    stack.begin(torch.zeros(starts, width), torch.zeros(3, width) if is_corrected else None, clients=3, length=length)
    return set(stack.factors)


def test_clients_that_begin_alike_and_take_plain_steps_have_them() -> None:
    assert factored() == {"2.weight"}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_others_have_their_weights(others: dict[str, Any]) -> None:
    assert factored(**others) == set()


def test_more_clients_fit_into_a_product_of_factors() -> None:
    plain, moving = (
        BatchTrainer(Case("wide", model=wide_chain, local=local).training(), kind="by hand").at_once
        for local in ({}, {"momentum": 0.9})
    )
    assert plain > moving


def test_a_window_of_factors_is_no_larger_than_its_updates_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Case("wide", model=wide_chain).training()
    row_bytes = sum(4 * parameter.numel() for parameter in wide_chain().parameters())
    for rows in (1, 3, 10):
        monkeypatch.setattr(batched, "ROWS_BYTES", rows * row_bytes + 1)
        trainer = BatchTrainer(training, kind="by hand")
        assert trainer.at_once <= rows
        assert max(trainer.window(jobs) for jobs in (1, 5, 100, 10_000)) <= rows


@pytest.mark.parametrize("shape", [(3, 4, 5), (250, 784, 200), (200, 60, 784), (130, 200, 200)])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_a_product_is_the_same_by_every_library(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], turned: tuple[bool, bool]
) -> None:
    m, r, n = shape
    generator = torch.Generator().manual_seed(m)
    a = torch.randn(r, m, generator=generator).t() if turned[0] else torch.randn(m, r, generator=generator)
    b = torch.randn(n, r, generator=generator).t() if turned[1] else torch.randn(r, n, generator=generator)
    exact = a.double() @ b.double()
    for small in (0, 10**12):
        monkeypatch.setattr(factors, "ONEDNN_FROM", small)
        torch.testing.assert_close(factors.times(a, b).double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(factors.times(a.double(), b.double()), exact)

"""Pooling with the channels last, with the bits of torch's own, forward and backward."""

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.simulations.engines import pooling
from atoll.simulations.engines.pooling import SMALL, speed_up_pooling


def both(pool, inputs, gradient_of=torch.ones_like):
    """Compute outputs and gradients of torch's own pooling and of ours."""
    ours = copy.deepcopy(pool)
    speed_up_pooling(ours)
    found = []
    for each in (pool, ours):
        leaf = inputs.clone().requires_grad_()
        outputs = each(leaf)
        outputs.backward(gradient_of(outputs))
        found.append((outputs.detach(), leaf.grad))
    return found


def equal(a, b):
    return all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(a, b, strict=True))


@settings(max_examples=60, deadline=None)
@example(seed=0, batch=1, channels=2, sides=(8, 8), kernel=4, stride=None, dilation=2, ceil_mode=False, padded=False)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 12),
    channels=st.integers(1, 40),
    sides=st.tuples(st.integers(8, 30), st.integers(8, 30)),
    kernel=st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 4), st.integers(1, 4))),
    stride=st.one_of(st.none(), st.integers(1, 3)),
    dilation=st.integers(1, 2),
    ceil_mode=st.booleans(),
    padded=st.booleans(),
)
def test_outputs_and_gradients_have_the_bits_of_torchs_own(
    seed, batch, channels, sides, kernel, stride, dilation, ceil_mode, padded
):
    """Maxima that are not unique agree, too: behind a ReLU most windows have several zeros."""
    torch.manual_seed(seed)
    inputs = torch.randn(batch, channels, *sides).relu_()
    least = kernel if isinstance(kernel, int) else min(kernel)
    pool = nn.MaxPool2d(kernel, stride, least // 2 if padded else 0, dilation, ceil_mode=ceil_mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooling, "SMALL", 0)
        theirs, ours = both(pool, inputs, _random)
    assert equal(theirs, ours)


def _random(outputs):
    return torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))


def test_what_is_no_number_is_passed_on_as_torch_does():
    inputs = torch.randn(4, 32, 16, 16)
    inputs[:, ::3, 4:6, 5] = torch.nan
    theirs, ours = both(nn.MaxPool2d(2), inputs)
    for one, other in zip(theirs, ours, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(
    "inputs",
    [
        torch.randn(2, 3, 8, 8),
        torch.randn(64, 32, 32),
        torch.randn(4, 32, 16, 16).to(memory_format=torch.channels_last),
        torch.randn(4, 32, 16, 16, dtype=torch.float64),
    ],
    ids=["small", "without a batch", "channels last already", "double"],
)
def test_what_does_not_gain_is_torchs_own(inputs):
    theirs, ours = both(nn.MaxPool2d(2), inputs)
    assert equal(theirs, ours)


def test_a_pool_that_gives_its_places_is_left_alone():
    pool = nn.MaxPool2d(2, return_indices=True)
    speed_up_pooling(pool)
    outputs, places = pool(torch.randn(10, 32, 28, 28))
    assert outputs.shape == places.shape
    assert outputs.numel() * 4 > SMALL


def test_hooks_see_it():
    pool, seen = nn.MaxPool2d(2), []
    pool.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.shape))
    speed_up_pooling(pool)
    pool(torch.randn(10, 32, 28, 28))
    assert seen == [(10, 32, 14, 14)]

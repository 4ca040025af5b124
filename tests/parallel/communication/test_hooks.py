"""Compressed gradients under DDP on two to four ranks, against plain sums, the formulas and the bytes handed over."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.parallel.communication import hooks
from atoll.parallel.communication.compression import bytes_per_rank
from tests.parallel.communication.learners import batches, loss_on_all, make_net
from tests.parallel.ranks import call_on_ranks

Array = np.ndarray[Any, Any]
ALL = ["none", "fp16", "bf16", "int8", "onebit", "powersgd:2"]


def wrapped(compression: str, bucket_cap_mb: float = 25.0) -> tuple[DistributedDataParallel, Any]:
    ddp = DistributedDataParallel(make_net(), bucket_cap_mb=bucket_cap_mb)
    return ddp, hooks.register(ddp, compression)


def drawn_gradients(rank: int, steps: int, num_elements: int = 4_810) -> list[Array]:
    rng = np.random.default_rng(rank)
    return [rng.standard_normal(num_elements).astype(np.float32) for _ in range(steps)]


def backward(ddp: DistributedDataParallel, drawn: Array) -> Array:
    """Return DDP's reduction of drawn gradients: the loss is their product with the weights."""
    ddp.zero_grad()
    weights = torch.cat([parameter.flatten() for parameter in ddp.parameters()])
    (0 * ddp(torch.zeros(1, 64)).sum() + (weights * torch.from_numpy(drawn)).sum()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in ddp.parameters() if parameter.grad is not None]).numpy()


def reduced_gradients(compression: str, steps: int, bucket_cap_mb: float = 25.0) -> list[Array]:
    ddp, _ = wrapped(compression, bucket_cap_mb)
    return [backward(ddp, drawn) for drawn in drawn_gradients(dist.get_rank(), steps)]


def of_each(function: Callable[..., Any], compressions: list[str], *args: Any) -> dict[str, Any]:
    """Several compressions in one start of the ranks."""
    return {compression: function(compression, *args) for compression in compressions}


def test_casts_give_the_mean_to_their_rounding() -> None:
    bounds = {"none": 1e-6, "fp16": 2.0**-10, "bf16": 2.0**-7}
    found, others = call_on_ranks(of_each, 2, reduced_gradients, list(bounds), 2)
    for compression, bound in bounds.items():
        for step in range(2):
            inputs = [drawn_gradients(rank, 2)[step].astype(np.float64) for rank in range(2)]
            np.testing.assert_array_equal(found[compression][step], others[compression][step])
            error = np.abs(found[compression][step] - np.mean(inputs, axis=0)).max()
            assert error <= bound * np.abs(inputs).max(), compression


def test_int8_is_within_a_level_of_the_mean_on_three_ranks() -> None:
    found = call_on_ranks(reduced_gradients, 3, "int8", 1)
    inputs = np.array([drawn_gradients(rank, 1)[0] for rank in range(3)], np.float64)
    largest = np.abs(inputs).max()  # of any block: half a level on the way there, another on the way back
    assert np.abs(found[0][0] - inputs.mean(axis=0)).max() <= 2 * largest / 254 * 1.001
    assert all(np.array_equal(found[0][0], other[0]) for other in found)


def fed_back(compression: str, steps: int, restart_after: int) -> tuple[Array, Array]:
    """The sum of all reduced gradients, and what the residuals hold; another process's hook goes on in between."""
    ddp, state = wrapped(compression)
    total = np.zeros(4_810, np.float64)
    for step, drawn in enumerate(drawn_gradients(dist.get_rank(), steps)):
        if step == restart_after:
            saved = state.state_dict()
            ddp, state = wrapped(compression)
            state.load_state_dict(saved)
        total += backward(ddp, drawn)
    saved = state.state_dict()
    return total, np.concatenate([saved[f"residual/{name}"].numpy() for name, _ in make_net().named_parameters()])


def test_what_is_left_out_is_carried_over_and_nothing_is_lost() -> None:
    """Summed over the steps: applied + mean of the residuals = mean of the gradients, also across a restart."""
    steps = 9
    found, others = call_on_ranks(of_each, 2, fed_back, ["onebit", "powersgd:2"], steps, 5)
    wanted = np.mean([np.sum(drawn_gradients(rank, steps), axis=0, dtype=np.float64) for rank in range(2)], axis=0)
    for (applied, left), (others_applied, others_left) in zip(found.values(), others.values(), strict=True):
        np.testing.assert_array_equal(applied, others_applied)
        assert np.abs(applied - wanted).max() > 0.1
        np.testing.assert_allclose(applied + (left + others_left) / 2, wanted, atol=1e-4)


def test_many_small_buckets_never_mix() -> None:
    """A bucket's second collective must not meet another bucket's: each bucket's mean is its own."""
    steps = 12
    results = call_on_ranks(of_each, 4, reduced_gradients, ["int8", "onebit", "powersgd:1"], steps, 0.0005)
    for step in range(steps):
        wanted = np.mean([drawn_gradients(rank, steps)[step] for rank in range(4)], axis=0)
        np.testing.assert_allclose(results[0]["int8"][step], wanted, atol=2 * 5 / 254)
        for compression, found in results[0].items():
            assert all(np.array_equal(found[step], other[compression][step]) for other in results)


class Ring:
    """Bytes that this rank would send for the collectives handed to torch, on rings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = 0.0
        others, ranks = dist.get_world_size() - 1, dist.get_world_size()
        for name, position, factor in (
            ("all_reduce", 0, 2 * others / ranks),
            ("all_to_all_single", 1, others / ranks),
            ("all_gather", 1, others),
        ):
            monkeypatch.setattr(dist, name, partial(self._call, getattr(dist, name), position, factor))

    def _call(self, collective: Any, position: int, factor: float, *args: Any, **more: Any) -> Any:
        self.sent += factor * args[position].nbytes
        return collective(*args, **more)


def bytes_handed_over(compression: str) -> float:
    ddp, _ = wrapped(compression)
    drawn = drawn_gradients(dist.get_rank(), 4)
    for gradients in drawn[:3]:
        backward(ddp, gradients)
    with pytest.MonkeyPatch.context() as monkeypatch:
        ring = Ring(monkeypatch)
        backward(ddp, drawn[3])
    return ring.sent


def test_bytes_are_those_that_are_handed_to_the_collectives() -> None:
    shapes = [parameter.shape for parameter in make_net().parameters()]
    for found in call_on_ranks(of_each, 3, bytes_handed_over, ALL[1:]):
        assert found == pytest.approx({name: bytes_per_rank(name, 4_810, 3, shapes) for name in ALL[1:]})


def overflow(compression: str) -> tuple[bool, bool]:
    """Return whether an overflow on rank 0 is seen in the step, and whether the step after it is finite."""
    ddp, _ = wrapped(compression)
    first, second = drawn_gradients(dist.get_rank(), 2)
    first[7] = np.inf if dist.get_rank() == 0 else 0
    return bool(np.isfinite(backward(ddp, first)).all()), bool(np.isfinite(backward(ddp, second)).all())


def test_an_overflow_is_seen_by_all_and_not_carried_over() -> None:
    for found in call_on_ranks(of_each, 2, overflow, ["fp16", "int8", "onebit"]):
        assert found == dict.fromkeys(["fp16", "int8", "onebit"], (False, True))


def test_residuals_of_another_model_are_refused() -> None:
    state = hooks.OneBit(None, {nn.Parameter(torch.zeros(3)): "w"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not of this model: residual/w of 4 elements, residual/v of 3 elements"):
        state.load_state_dict({"residual/w": torch.zeros(4), "residual/v": torch.zeros(3)})


def loss_after(compression: str, steps: int) -> float:
    """Return the loss on all digits; the two ranks see different ones."""
    ddp, _ = wrapped(compression)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
    for images, targets in batches(dist.get_rank(), dist.get_world_size(), steps=steps, size=64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images), targets).backward()
        optimizer.step()
    return loss_on_all(ddp.module)


def test_digits_are_learned_as_well_with_every_compression() -> None:
    losses, others = call_on_ranks(of_each, 2, loss_after, ALL, 150)
    assert losses == others
    assert loss_on_all(make_net()) > 2.2
    assert losses["none"] < 0.25
    for compression in ALL[1:]:
        assert losses[compression] < losses["none"] + 0.02, losses

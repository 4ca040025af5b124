"""The collectives by hand against the library's, and their bytes against theory."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from examples.teaching.collectives import parameter_server, ring, trees
from examples.teaching.collectives.wire import Wire
from tests.parallel.forked import run_ranks

SHAPES = [(1,), (2,), (7,), (24,), (5, 11), (1000,)]


def drawn(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Whole numbers: their float32 sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, shape, generator=generator).float()


def of_library(name: str, mine: torch.Tensor) -> torch.Tensor | None:
    """Return the results of c10d; the root is the last rank."""
    num_ranks, root, result = dist.get_world_size(), dist.get_world_size() - 1, mine.clone()
    match name:
        case "all_gather":
            parts = [torch.empty_like(mine) for _ in range(num_ranks)]
            dist.all_gather(parts, mine)
            return torch.stack(parts)
        case "broadcast" | "broadcast_naive" | "broadcast_tree":
            dist.broadcast(result, root)
        case "reduce_naive" | "reduce_tree":
            dist.reduce(result, root)
            return result if dist.get_rank() == root else None
        case _:
            dist.all_reduce(result)
    return result.view(-1).tensor_split(num_ranks)[dist.get_rank()] if name == "reduce_scatter" else result


def both() -> dict[tuple[str, tuple[int, ...]], tuple[bool, int, int]]:
    """Return, for each collective and shape, whether ours equals the library's, and the bytes sent and received."""
    root = dist.get_world_size() - 1
    functions = {
        "all_reduce": ring.all_reduce,
        "reduce_scatter": ring.reduce_scatter,
        "all_gather": ring.all_gather,
        "broadcast": partial(ring.broadcast, root=root),
        "broadcast_naive": partial(trees.broadcast_naive, root=root),
        "broadcast_tree": partial(trees.broadcast_tree, root=root),
        "reduce_naive": partial(trees.reduce_naive, root=root),
        "reduce_tree": partial(trees.reduce_tree, root=root),
    }
    found = {}
    for name, function in functions.items():
        for shape in SHAPES:
            wire, mine = Wire(), drawn(dist.get_rank(), shape)
            ours, theirs = function(wire, mine), of_library(name, mine)
            is_untouched = torch.equal(mine, drawn(dist.get_rank(), shape))
            is_equal = ours is theirs is None or (ours is not None and theirs is not None and torch.equal(ours, theirs))
            found[name, shape] = is_equal and is_untouched, wire.bytes_sent, wire.bytes_received
    return found


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> list[Any]:
    return run_ranks(both, request.param)


def test_all_are_equal_to_the_library_s(ranks: list[Any]) -> None:
    assert [key for found in ranks for key, (is_equal, _, _) in found.items() if not is_equal] == []


def sent(ranks: list[Any], name: str, shape: tuple[int, ...]) -> list[int]:
    return [found[name, shape][1] for found in ranks]


def test_what_is_sent_is_received(ranks: list[Any]) -> None:
    for key in ranks[0]:
        assert sum(found[key][1] for found in ranks) == sum(found[key][2] for found in ranks)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_ring_sends_what_theory_says(ranks: list[Any], shape: tuple[int, ...]) -> None:
    """2 (n-1)/n M from each rank where n divides the length; within two chunks of it, and exact in sum, otherwise."""
    num_ranks, num_bytes = len(ranks), 4 * math.prod(shape)
    chunk = 4 * math.ceil(math.prod(shape) / num_ranks)
    for name, halves in (("all_reduce", 2), ("reduce_scatter", 1)):
        found = sent(ranks, name, shape)
        assert sum(found) == halves * (num_ranks - 1) * num_bytes
        share = halves * (num_ranks - 1) / num_ranks * num_bytes
        assert all(abs(one - share) <= (0 if num_bytes % (4 * num_ranks) == 0 else halves * chunk) for one in found)
    assert sent(ranks, "all_gather", shape) == [(num_ranks - 1) * num_bytes] * num_ranks


def test_a_pipeline_sends_the_tensor_from_all_but_the_last(ranks: list[Any]) -> None:
    found = sent(ranks, "broadcast", (1000,))
    assert sorted(found) == sorted([0] + [4000] * (len(ranks) - 1))


def test_a_tree_spares_its_root(ranks: list[Any]) -> None:
    num_ranks, root = len(ranks), len(ranks) - 1
    naive, tree = sent(ranks, "broadcast_naive", (1000,)), sent(ranks, "broadcast_tree", (1000,))
    assert naive == [0] * root + [4000 * (num_ranks - 1)]
    assert tree[root] == 4000 * math.ceil(math.log2(num_ranks))
    assert sum(tree) == sum(naive) == sum(sent(ranks, "reduce_tree", (1000,))) == 4000 * (num_ranks - 1)
    received = [found["reduce_tree", (1000,)][2] for found in ranks]
    assert received[root] == tree[root]


def slope_at(number: int, weights: torch.Tensor) -> torch.Tensor:
    """Return the gradient of worker `number`, of (number/2) |w - 10 number|²."""
    return number * (weights - 10 * number)


def served(*, is_synchronous: bool, num_rounds: int) -> tuple[np.ndarray[Any, Any], list[int], int, int]:
    wire, weights, order = Wire(), torch.arange(5, dtype=torch.float64), list[int]()
    if wire.rank != parameter_server.SERVER:
        slope = partial(slope_at, wire.rank)
        parameter_server.work(wire, torch.empty_like(weights), num_rounds=num_rounds, gradient_of=slope)
    elif is_synchronous:
        parameter_server.serve(wire, weights, num_rounds=num_rounds, lr=0.1)
    else:
        order = parameter_server.serve_asynchronously(wire, weights, num_rounds=num_rounds, lr=0.1)
    return weights.numpy(), order, wire.bytes_sent, wire.bytes_received


def test_a_parameter_server_is_data_parallel_training_at_the_price_of_its_port() -> None:
    results = run_ranks(partial(served, is_synchronous=True, num_rounds=7), 4)
    weights = torch.arange(5, dtype=torch.float64)
    for _ in range(7):
        weights -= 0.1 * sum(slope_at(number, weights) for number in (1, 2, 3)) / 3
    np.testing.assert_allclose(results[0][0], weights.numpy(), rtol=1e-12)
    num_workers, num_bytes = 3, 5 * 8
    assert results[0][2] + results[0][3] == 7 * 2 * num_workers * num_bytes
    assert all(worker[2] == worker[3] == 7 * num_bytes for worker in results[1:])


def test_an_asynchronous_server_applies_what_comes_to_what_has_become_of_the_weights() -> None:
    """Replayed by hand in the order that the server wrote down: each worker's gradient is of the weights it had got."""
    results = run_ranks(partial(served, is_synchronous=False, num_rounds=30), 3)
    found, order, bytes_sent, bytes_received = results[0]
    assert sorted(order) == [1] * 30 + [2] * 30
    weights = torch.arange(5, dtype=torch.float64)
    seen = {1: weights.clone(), 2: weights.clone()}
    for worker in order:
        weights -= 0.1 / 2 * slope_at(worker, seen[worker])
        seen[worker] = weights.clone()
    np.testing.assert_allclose(found, weights.numpy(), rtol=1e-12)
    assert bytes_sent + bytes_received == 30 * 2 * 2 * 40


def serve_nobody() -> None:
    parameter_server.serve(Wire(), torch.zeros(1), num_rounds=1, lr=1.0)


def test_a_server_without_workers_is_refused() -> None:
    with pytest.raises(RuntimeError, match="at least one worker beside it, got 1 rank in all"):
        run_ranks(serve_nobody, 1)

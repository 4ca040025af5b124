"""Broadcast and reduce, naive and as a binomial tree, whose root is not the only rank that works.

Ranks are counted from the root here (number = rank - root, modulo n). With n = 8:

    naive                       binomial tree, three rounds instead of seven

    0 -> 1                      round 0    0 -> 1
    0 -> 2                      round 1    0 -> 2   1 -> 3
    ...                         round 2    0 -> 4   1 -> 5   2 -> 6   3 -> 7
    0 -> 7

In both, each rank but the root receives M bytes once; but the root sends (n-1) M in the one and ceil(log2 n) M in the
other. A reduce is a broadcast backwards: the arrows are reversed, and the receiver adds.
"""

import torch

from examples.teaching.collectives.wire import Wire, wait_all


def broadcast_naive(wire: Wire, tensor: torch.Tensor, root: int) -> torch.Tensor:
    """Return the root's tensor on every rank: the root sends it to each of them."""
    result = tensor.detach().clone().contiguous()
    if wire.rank == root:
        wait_all([wire.send(result, rank) for rank in range(wire.size) if rank != root])
    else:
        wire.receive(result, root)()
    return result


def reduce_naive(wire: Wire, tensor: torch.Tensor, root: int) -> torch.Tensor | None:
    """Return the sum over the ranks, on the root; None elsewhere. All ranks send to the root."""
    if wire.rank != root:
        wire.send(tensor.detach(), root)()
        return None
    result, received = (
        tensor.detach().clone().contiguous(),
        torch.empty_like(tensor, memory_format=torch.contiguous_format),
    )
    for rank in range(wire.size):
        if rank != root:
            wire.receive(received, rank)()
            result += received
    return result


def broadcast_tree(wire: Wire, tensor: torch.Tensor, root: int) -> torch.Tensor:
    """Return the root's tensor on every rank: each that has it passes it on; their number doubles in every round."""
    result, number = tensor.detach().clone().contiguous(), (wire.rank - root) % wire.size
    for have in _rounds(wire.size):  # numbers 0 .. have - 1 have it
        if number < have and number + have < wire.size:
            wire.send(result, (wire.rank + have) % wire.size)()
        elif have <= number < 2 * have:
            wire.receive(result, (wire.rank - have) % wire.size)()
    return result


def reduce_tree(wire: Wire, tensor: torch.Tensor, root: int) -> torch.Tensor | None:
    """Return the sum over the ranks, on the root; None elsewhere. The rounds of `broadcast_tree`, backwards."""
    result, number = tensor.detach().clone().contiguous(), (wire.rank - root) % wire.size
    received = torch.empty_like(result)
    for have in reversed(_rounds(wire.size)):
        if number < have and number + have < wire.size:
            wire.receive(received, (wire.rank + have) % wire.size)()
            result += received
        elif have <= number < 2 * have:
            wire.send(result, (wire.rank - have) % wire.size)()
    return result if wire.rank == root else None


def _rounds(size: int) -> list[int]:
    """Return the number of ranks with the tensor before each round: 1, 2, 4, ... below `size`."""
    return [1 << number for number in range((size - 1).bit_length())]

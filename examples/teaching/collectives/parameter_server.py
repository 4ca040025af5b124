r"""A parameter server: rank 0 holds the weights; workers pull them, and push gradients.

                 server (rank 0)
               /   |    |    \
        pull  v    v    v     v           M bytes to each of N workers in each round
            worker 1 ...       N
               \   |    |    /
        push     v  v   v   v             M bytes from each:  2 N M through one port in each round,
                 server                   where a ring of N ranks has less than 2 M at each

    synchronous     w <- w - η mean of the N gradients, when all are there; then all workers get w
    asynchronous    w <- w - η/N g_i as soon as one arrives, and its sender alone gets w: no worker waits for the
                    slowest, but g_i belongs to weights that others have changed since

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, section 3; asynchronous
updates: Dean et al., "Large Scale Distributed Deep Networks" (Downpour SGD), NIPS 2012.
"""

from collections.abc import Callable

import torch

from atoll.ground.printable import count_of
from examples.teaching.collectives.wire import Wire, wait_all

SERVER = 0
"""The server's rank."""


def serve(wire: Wire, weights: torch.Tensor, *, num_rounds: int, lr: float) -> None:
    """Run synchronous rounds on rank 0; the weights change in place.

    Raises:
        ValueError: there is no worker.
    """
    workers = _workers(wire)
    gradients = [torch.empty_like(weights) for _ in workers]
    for _ in range(num_rounds):
        wait_all([wire.send(weights, worker) for worker in workers])
        wait_all([wire.receive(gradient, worker) for gradient, worker in zip(gradients, workers, strict=True)])
        weights -= lr * torch.stack(gradients).mean(dim=0)


def serve_asynchronously(wire: Wire, weights: torch.Tensor, *, num_rounds: int, lr: float) -> list[int]:
    """Apply each worker's gradients as they arrive, on rank 0; the weights change in place.

    Returns:
        The workers in the order of their gradients: each `num_rounds` times.

    Raises:
        ValueError: there is no worker.
    """
    workers, order = _workers(wire), list[int]()
    rounds_left, gradient = dict.fromkeys(workers, num_rounds), torch.empty_like(weights)
    wait_all([wire.send(weights, worker) for worker in workers])
    while any(rounds_left.values()):
        worker = wire.receive_from_any(gradient)
        weights -= lr / len(workers) * gradient
        order.append(worker)
        rounds_left[worker] -= 1
        if rounds_left[worker]:
            wire.send(weights, worker)()
    return order


def work(
    wire: Wire, weights: torch.Tensor, *, num_rounds: int, gradient_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Run a worker's rounds, with either server: pull, compute, push.

    Args:
        wire: to the server.
        weights: the tensor for the pulled weights; of the server's shape.
        num_rounds: of the worker.
        gradient_of: the worker's gradient at some weights, of the same shape.
    """
    for _ in range(num_rounds):
        wire.receive(weights, SERVER)()
        wire.send(gradient_of(weights), SERVER)()


def _workers(wire: Wire) -> range:
    if wire.size < 2:
        raise ValueError(
            f"a parameter server needs at least one worker beside it, got {count_of(wire.size, 'rank')} in all"
        )
    return range(1, wire.size)

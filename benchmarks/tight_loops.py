"""FedAvg by hand for a single experiment, as the baseline for the overhead of the engines.

    lean        one model, whose parameters are loaded and stepped without an optimizer object; one process for each
                core, each with its share of the clients; a round's sums are added in shared memory
    idiomatic   as in tutorials: a copy of the state, torch.optim.SGD and a DataLoader's order for each client

Neither has a metric, a report or a seed for each client; both shuffle in every epoch.

    python -m benchmarks.tight_loops [--processes 2] [--seconds 3]
"""

import argparse
import copy
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from benchmarks.report import say

Client = tuple[torch.Tensor, torch.Tensor]
"""The inputs (n, ...) and targets (n,) of one client."""


class Lean:
    """The clients of one process, trained in one model.

    Args:
        model: () -> the model.
        loss: (outputs, targets) -> the mean loss.
        lr: learning rate of plain SGD.
        batch_size: B; one epoch.
    """

    def __init__(
        self, model: Callable[[], nn.Module], loss: Callable[[Any, Any], torch.Tensor], *, lr: float, batch_size: int
    ) -> None:
        self._model, self._loss, self._lr, self._batch_size = model(), loss, lr, batch_size
        self._parameters = list(self._model.parameters())
        self._plain = [parameter.detach() for parameter in self._parameters]

    def train(self, start: Sequence[torch.Tensor], client: Client) -> list[torch.Tensor]:
        """Return the parameters of one client after one epoch; the next call overwrites them."""
        inputs, targets = client
        torch._foreach_copy_(self._plain, list(start))
        for rows in torch.randperm(len(targets)).split(self._batch_size):
            loss = self._loss(self._model(inputs[rows]), targets[rows])
            gradients = torch.autograd.grad(loss, self._parameters)
            torch._foreach_add_(self._plain, list(gradients), alpha=-self._lr)
        return self._plain

    def round(self, start: Sequence[torch.Tensor], clients: Sequence[Client]) -> list[torch.Tensor]:
        """Return the sum of n_k w_k over the clients."""
        sums = [torch.zeros_like(tensor) for tensor in start]
        for client in clients:
            torch._foreach_add_(sums, self.train(start, client), alpha=len(client[1]))
        return sums


class LeanProcesses:
    """One process for each core, forked once; `start` and the sums are in shared memory.

    Args:
        loop: the loop of each process.
        start: tensors of the global model, in the shapes of those passed to `round`.
        clients: all clients; a round selects its cohort by index.
        processes: the number of processes.
    """

    def __init__(self, loop: Lean, start: Sequence[torch.Tensor], clients: Sequence[Client], *, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._start = [tensor.clone().share_memory_() for tensor in start]
        self._sums = [[torch.zeros_like(t).share_memory_() for t in start] for _ in range(processes)]
        self._pipes: list[Connection] = []
        self._processes: list[ForkProcess] = []
        self._num_examples = [len(targets) for _, targets in clients]
        for sums in self._sums:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, loop, self._start, sums, clients), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def round(self, start: Sequence[torch.Tensor], cohort: Sequence[int]) -> list[torch.Tensor]:
        """Return the next global model of FedAvg."""
        torch._foreach_copy_(self._start, list(start))
        for number, pipe in enumerate(self._pipes):
            pipe.send(cohort[number :: len(self._pipes)])
        for pipe in self._pipes:
            pipe.recv()
        total = [sum(sums[1:], start=sums[0]) for sums in zip(*self._sums, strict=True)]
        return list(torch._foreach_div(total, float(sum(self._num_examples[index] for index in cohort))))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(
    pipe: Connection, loop: Lean, start: list[torch.Tensor], sums: list[torch.Tensor], clients: Sequence[Client]
) -> None:
    torch.set_num_threads(1)
    while True:
        cohort = pipe.recv()
        torch._foreach_copy_(sums, loop.round(start, [clients[index] for index in cohort]))
        pipe.send(None)


def idiomatic(
    model: nn.Module, loss: Callable[[Any, Any], torch.Tensor], clients: Sequence[Client], *, lr: float, batch_size: int
) -> dict[str, torch.Tensor]:
    """Return the next global model of FedAvg as a state dict, in one process."""
    start = copy.deepcopy(model.state_dict())
    sums = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for inputs, targets in clients:
        model.load_state_dict(start)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for rows in torch.randperm(len(targets)).split(batch_size):
            optimizer.zero_grad()
            loss(model(inputs[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        for name, tensor in model.state_dict().items():
            sums[name] += len(targets) * tensor
    return {name: tensor / sum(len(targets) for _, targets in clients) for name, tensor in sums.items()}


def digits_mlp() -> nn.Module:
    """Return the multilayer perceptron 64-32-10."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def two_nn() -> nn.Module:
    """Return the multilayer perceptron 784-200-200-10 (McMahan et al. 2017)."""
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def mcmahan_cnn() -> nn.Module:
    """Return two convolutions of 5 x 5 with 32 and 64 channels, and 512 hidden features (McMahan et al. 2017)."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


SETTINGS: dict[str, tuple[Callable[[], nn.Module], int, int, int, int]] = {
    "digits-mlp": (digits_mlp, 64, 100, 18, 100),
    "2nn": (two_nn, 784, 1000, 60, 100),
    "cnn": (mcmahan_cnn, 784, 1000, 60, 10),
}
"""The model, features, clients, examples of each client, and clients in a round; B = 10, E = 1, lr 0.1."""


def synthetic(features: int, clients: int, examples: int) -> list[Client]:
    """Return examples of ten classes that a linear model can separate, so that a loop that does not learn fails."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(features, 10, generator=generator)
    inputs = torch.rand(clients * examples, features, generator=generator)
    targets = ((inputs - 0.5) @ teacher).argmax(dim=1)
    return list(zip(inputs.split(examples), targets.split(examples), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, (model, features, num_clients, examples, cohort) in SETTINGS.items():
        clients = synthetic(features, num_clients, examples)
        weights = [parameter.detach() for parameter in model().parameters()]
        loop = Lean(model, nn.functional.cross_entropy, lr=0.1, batch_size=10)
        with LeanProcesses(loop, weights, clients, processes=arguments.processes) as processes:
            began, trained = time.perf_counter(), 0
            while time.perf_counter() - began < arguments.seconds:
                weights = processes.round(weights, [(trained + i) % num_clients for i in range(cohort)])
                trained += cohort
            say(f"{name}: {trained / (time.perf_counter() - began):.0f} clients/s in {arguments.processes} processes")


if __name__ == "__main__":
    main()

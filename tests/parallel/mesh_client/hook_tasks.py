"""Tasks with algorithms of their own: those of the examples, hooks that need whole tensors, hooks that hold much."""

import random
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll import Algorithm, Task
from tests.parallel.mesh_client import tasks

EXAMPLES = Path(__file__).parents[3] / "examples" / "algorithms"


def _example(name: str) -> Task:
    """Return the task of the tests with the algorithm of an example."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        task = import_module(name).task
    finally:
        sys.path.remove(str(EXAMPLES))
    return replace(tasks.task, algorithm=task.algorithm, options=task.options)


class Proximal(Algorithm):
    """FedProx, which keeps nothing."""

    def gradients(self, client: Any, gradients: Any) -> Any:
        return {name: g + 0.3 * (client.parameters[name] - client.start[name]) for name, g in gradients.items()}


class Normed(Algorithm):
    """Norms of tensors and of all of them, as tensors and as numbers, and a decision by one."""

    def shared(self, model: Any) -> Any:
        return {"norm": torch.zeros(()), "of each": torch.zeros(sum(1 for _ in model.parameters()))}

    def state(self, model: Any) -> Any:
        return {"steps": torch.zeros((), dtype=torch.int64), "large": torch.zeros(3)}

    def gradients(self, client: Any, gradients: Any) -> Any:
        total = float(sum((g * g).sum() for g in gradients.values())) ** 0.5
        means = {name: g.mean().item() for name, g in gradients.items()}
        if sum(g.abs().sum() for g in gradients.values()) > 1e-9:
            client.state["large"] = client.state["large"] + 1
        return {name: (g - means[name]) / (1 + total + g.norm()) for name, g in gradients.items()}

    def after_step(self, client: Any) -> None:
        client.state["steps"] += 1
        for name, parameter in client.parameters.items():
            parameter.mul_(1 - 1e-3 * torch.tanh(parameter.norm() - client.start[name].norm()))

    def end(self, client: Any) -> None:
        client.shared["of each"] = torch.stack([p.norm() for p in client.parameters.values()])
        client.shared["norm"] = client.shared["of each"].norm()


class Averaged(Algorithm):
    """A personal model: the average of the local models since the first round, which the site evaluates."""

    def state(self, model: Any) -> Any:
        return {name: tensor.clone() for name, tensor in model.state_dict().items()} | {"count": torch.ones(())}

    def after_step(self, client: Any) -> None:
        client.state["count"] = client.state["count"] + 1
        for name, now in client.model.state_dict().items():
            client.state[name] = client.state[name].lerp(now, 1 / client.state["count"])

    def end(self, client: Any) -> None:
        client.leaves_out = {name for name in client.start if name.endswith("norm.weight")}

    def evaluated(self, client: Any) -> Any:
        return {name: tensor for name, tensor in client.state.items() if name != "count"}


class Holding(Algorithm):
    """Hooks that hold values of every kind from step to step, each of which the next gradients depend on."""

    def shared(self, model: Any) -> Any:
        return {"norms": torch.zeros(3)}

    def state(self, model: Any) -> Any:
        zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        return zeros | {"steps": torch.zeros((), dtype=torch.int64)}

    def begin(self, client: Any) -> None:
        client.velocity = {name: torch.zeros_like(tensor) for name, tensor in client.parameters.items()}
        client.rows, client.norms, client.largest = {}, [], -float("inf")
        client.anchor, client.now, client.before = client.start, client.parameters, client.model.state_dict()
        client.noise, client.dice = torch.Generator().manual_seed(3), random.Random(4)
        client.numpy = np.random.Generator(np.random.MT19937(5)), np.random.default_rng(6)
        client.weights, client.rate = np.ones(2), np.float32(1)

    def gradients(self, client: Any, gradients: Any) -> Any:
        scale = 1 + 0.1 * float(torch.rand((), generator=client.noise)) + 0.1 * client.dice.random()
        scale *= 1 + 0.1 * sum(generator.random() for generator in client.numpy) * float(client.weights.sum())
        found = {}
        for name, g in gradients.items():
            client.velocity[name] = 0.5 * client.velocity[name] + g
            client.rows[name] = 0.5 * client.rows.get(name, 0) + (g * g).mean(dim=-1)
            pull = 0.05 * (client.now[name] - client.anchor[name]) + 0.01 * client.state[name]
            pull = pull + 0.01 * (client.now[name] - client.before[name])  # these are the same tensor
            found[name] = scale * float(client.rate) * client.velocity[name] / (1 + client.rows[name].norm()) + pull
        client.norms.append(float(sum((g * g).sum() for g in found.values())) ** 0.5)
        return {name: g / (1 + 0.1 * sum(client.norms[-3:])) for name, g in found.items()}

    def after_step(self, client: Any) -> None:
        client.state["steps"] += 1
        client.largest, client.rate = max(client.largest, client.norms[-1]), client.rate * np.float32(0.99)
        client.weights *= 0.9
        client.shared["norms"][client.num_steps % 3] += client.largest
        client.leaves_out |= {name for name in client.start if name.endswith(f"{client.num_steps - 1}.norm.weight")}
        for name, tensor in client.parameters.items():
            client.state[name] = client.state[name].lerp(tensor, 0.2)


class Opaque(Holding):
    """Hooks that hold what no checkpoint can: from the fifth step on."""

    def after_step(self, client: Any) -> None:
        super().after_step(client)
        if client.num_steps == 5:
            client.optimizer = torch.optim.SGD([torch.zeros(2)])


holding, opaque = replace(tasks.task, algorithm=Holding()), replace(tasks.task, algorithm=Opaque())
proximal = replace(tasks.task, algorithm=Proximal())
clipped = replace(proximal, local=replace(tasks.task.local, prox_mu=0.3, clip_norm=0.5, momentum=0.5))
normed = replace(tasks.task, algorithm=Normed())
averaged = replace(tasks.task, algorithm=Averaged())

OF_EXAMPLES = ("feddyn", "fedcm", "ditto", "pfedme", "moon", "mime", "ifca")
"""The tasks of the examples, which import scikit-learn: each is made when a test asks for it."""


def __getattr__(name: str) -> Task:
    if name not in OF_EXAMPLES:
        raise AttributeError(name)
    globals()[name] = task = _example(name)
    return task

"""Tasks with algorithms of their own: those of the examples, and hooks that need whole tensors."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from atoll import Algorithm, Task
from tests.parallel.crew import tasks

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


proximal = replace(tasks.task, algorithm=Proximal())
clipped = replace(proximal, local=replace(tasks.task.local, prox_mu=0.3, clip_norm=0.5, momentum=0.5))
normed = replace(tasks.task, algorithm=Normed())
averaged = replace(tasks.task, algorithm=Averaged())
feddyn, fedcm, ditto = _example("feddyn"), _example("fedcm"), _example("ditto")
pfedme, moon, mime, ifca = _example("pfedme"), _example("moon"), _example("mime"), _example("ifca")

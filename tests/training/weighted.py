"""Tasks whose losses divide by something else than examples, what they divide by, and a plain loop in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from atoll import Local, Task

VOCAB, LENGTH = 7, 5
WEIGHTS = torch.tensor([0.25, 3.0, 0.5, 1.0, 2.0, 0.125, 1.5])
"""Weights of the classes, whose sums in float32 are exact."""


def per_token(outputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), **options)


def padded(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return per_token(outputs, targets, ignore_index=0)


def shifted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of a causal language model as Hugging Face has it: labels are the inputs."""
    return per_token(outputs[:, :-1], targets[:, 1:])


def masked(outputs: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
    each = per_token(outputs, targets["words"], reduction="none").view(targets["mask"].shape)
    return (each * targets["mask"]).sum() / targets["mask"].sum()


def classes(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return per_token(outputs, targets, weight=WEIGHTS.to(outputs.dtype))


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return per_token(outputs, targets, reduction="sum") / 100


def paired(outputs: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    words, mask = targets
    return masked(outputs, {"words": words, "mask": mask})


@dataclass(frozen=True)
class Kind:
    loss: Callable[[Any, Any], torch.Tensor]
    units: Any


KINDS = {
    "padding": Kind(padded, lambda targets: (targets != 0).sum()),
    "shifted": Kind(shifted, lambda targets: int((targets[:, 1:] != -100).sum())),
    "masked": Kind(masked, lambda targets: targets["mask"].sum()),
    "paired": Kind(paired, lambda targets: targets[1].sum()),
    "classes": Kind(classes, lambda targets: WEIGHTS[targets].sum()),
    "summed": Kind(summed, "sum"),
}


class Words(Dataset[Any]):
    """Rows of words of very different length; the first part of the row counts."""

    def __init__(self, kind: str, size: int, seed: int = 5) -> None:
        self.kind, self.size = kind, size
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, VOCAB, (size, LENGTH + 1), generator=generator)
        self.words[: size // 2] = self.words[: size // 2].clamp(max=2)  # so that class weights differ by row

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.words[index, :-1], self.words[index, 1:].clone()
        end = (1, 5, 2, 4, 5)[index % 5]
        mask = (torch.arange(LENGTH) < end).float()
        if self.kind == "padding":
            targets[end:] = 0
        elif self.kind == "shifted":
            targets = inputs.clone()
            targets[end:] = -100
        elif self.kind == "masked":
            return inputs, {"words": targets, "mask": mask}
        elif self.kind == "paired":
            return inputs, (targets, mask)
        return inputs, targets


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Embedding(VOCAB, 6), nn.Tanh(), nn.Linear(6, VOCAB))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


LOCAL = Local(batch_size=8, lr=0.3, shuffle=False)
SIZES = {"north": 20, "south": 9}


def data_of(kind: str) -> Callable[[str, str], Words]:
    return lambda site, split: Words(
        kind, SIZES[site] if split == "train" else SIZES[site] // 2, len(site) + ord(site[0])
    )


def task_of(kind: str, *, is_said: bool = True, sites: tuple[str, ...] = ("north",)) -> Task:
    found = KINDS[kind]
    return Task(
        model=make_model,
        data=data_of(kind),
        loss=found.loss,
        sites=sites,
        local=LOCAL,
        units=found.units if is_said else None,
    )


def everything(dataset: Words, rows: slice = slice(None)) -> Any:
    return torch.utils.data.default_collate([dataset[index] for index in range(len(dataset))[rows]])


def plain_loop(kind: str, epochs: int) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """Return the weights after SGD on whole batches in float64, the loss of each step, and that of the test."""
    loss, model = KINDS[kind].loss, make_model().double()
    train, test = data_of(kind)("north", "train"), data_of(kind)("north", "test")
    losses = []
    for _ in range(epochs):
        for start in range(0, len(train), 8):
            inputs, targets = everything(train, slice(start, start + 8))
            model.zero_grad()
            value = loss(model(inputs), _in_double(targets))
            value.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LOCAL.lr * parameter.grad
            losses.append(value.item())
    inputs, targets = everything(test)
    with torch.no_grad():
        of_test = loss(model(inputs), _in_double(targets)).item()
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return state, losses, of_test / len(test) if kind == "summed" else of_test


def _in_double(targets: Any) -> Any:
    if isinstance(targets, dict):
        return {name: _in_double(value) for name, value in targets.items()}
    if isinstance(targets, list | tuple):
        return tuple(map(_in_double, targets))
    return targets.double() if targets.is_floating_point() else targets

"""The form of a model, names and shapes of its exchanged tensors, which its forward pass must not change.

A parameter that a forward pass makes is in no optimizer and in no version, so it would keep its first value, which
differs between sites. A saved buffer that is registered late is not exchanged, and one that grows has no mean.
"""

import torch
from torch import nn

from atoll.task.errors import TaskBroken
from atoll.training.trials.unit_check import is_due

Shapes = dict[str, tuple[int, ...]]

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DDP and torch.compile add to names."""


class SameForm:
    """The form of newly built modules.

    Args:
        modules: the model, or the stages of it on this rank.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        self._parameters, self._buffers = _forms(modules)
        self._frozen = _frozen(modules)
        self._seen = 0

    def fault(self) -> str | None:
        """Return the reason why the form has changed, or None."""
        parameters, buffers = _forms(self._modules)
        if made := parameters.keys() - self._parameters.keys():
            return (
                f"{_listed(made)}: made by the model's forward pass, so no optimizer has it and it is not exchanged: "
                "make it in task.model(), or call the model there with an example before it is returned"
            )
        if made := buffers.keys() - self._buffers.keys():
            return (
                f"{_listed(made)}: registered by the model's forward pass, so it is not exchanged: register it in "
                "task.model(), or with register_buffer(..., persistent=False), which keeps it out of the model"
            )
        if thawed := {name for name in self._frozen - _frozen(self._modules) if name in parameters}:
            return (
                f"{_listed(thawed)}: requires_grad was set by the model's forward pass, and no optimizer has it: let "
                "task.model() return a model whose parameters already require gradients"
            )
        before, now = self._parameters | self._buffers, parameters | buffers
        for name, shape in before.items():
            if name not in now:
                return f"{name}: removed by the model's forward pass; a tensor that is exchanged must stay in the model"
            if now[name] != shape:
                return (
                    f"{name}: its shape was {shape} and is {now[name]} after a forward pass; a tensor that is "
                    "exchanged keeps its shape (register_buffer(..., persistent=False) excludes it from the exchange)"
                )
        return None

    def left_by_fit(self) -> str | None:
        """Return the sentence that a custom loop has changed the model's form, or None."""
        before, (parameters, buffers) = self._parameters | self._buffers, _forms(self._modules)
        now = parameters | buffers
        found = [
            f"{name} was {list(before[name])} and is {list(now[name])}"
            for name in before.keys() & now.keys()
            if before[name] != now[name]
        ]
        found += [f"{name} is gone" for name in before.keys() - now.keys()]
        found += [f"{name} is new" for name in now.keys() - before.keys()]
        if not found:
            return None
        return (
            f"task.fit has left other tensors in the model than it was given: {_listed(set(found))}; what is exchanged "
            "keeps its names and shapes, so train a copy, or restore the model's form"
        )

    def see(self) -> None:
        """Check the model's form after a forward pass; only the first passes and those of a power of two are checked.

        Raises:
            TaskBroken: the form has changed.
        """
        self._seen += 1
        if is_due(self._seen) and (fault := self.fault()):
            raise TaskBroken(fault)


def _forms(modules: tuple[nn.Module, ...]) -> tuple[Shapes, Shapes]:
    """Return the shapes of the parameters and of the saved buffers, by name."""
    parameters: Shapes = {}
    buffers: Shapes = {}
    for model in modules:
        for prefix, module in model.named_modules():
            parameters |= _shapes(prefix, module._parameters)
            passing = module._non_persistent_buffers_set
            buffers |= _shapes(
                prefix, {name: tensor for name, tensor in module._buffers.items() if name not in passing}
            )
    return parameters, buffers


def _frozen(modules: tuple[nn.Module, ...]) -> set[str]:
    """Return the names of the parameters that do not train."""
    named = ((name, tensor) for model in modules for name, tensor in model.named_parameters())
    return {_without_wrappers(name) for name, tensor in named if not tensor.requires_grad}


def _shapes(prefix: str, tensors: "dict[str, torch.Tensor | None]") -> Shapes:
    begin = _without_wrappers(f"{prefix}." if prefix else "")
    return {begin + name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}


def _without_wrappers(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def _listed(names: "set[str]") -> str:
    first, *more = sorted(names)
    return f"{first} and {len(more)} more" if more else first

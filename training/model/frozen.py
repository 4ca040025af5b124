"""The tensors of a model that training does not change: with `Task(travels="trained")` they are not exchanged.

A tensor of the state_dict is *trained*, and exchanged, if it is

    a parameter with requires_grad
    a buffer of a module that directly has such a parameter
    a running statistic of a batch norm, which follows the data even when its scale and shift are frozen

All others are *frozen*. Every site must have the same values of them, from the seed of the run or from a `Base`.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _NormBase

from atoll.task.base import Base
from atoll.task.context import Context
from atoll.task.errors import TaskBroken
from atoll.training.base.digests import digest_of, line_of
from atoll.training.base.loading import Matched, load, match, tensors_of
from atoll.training.base.peft_models import base_faults
from atoll.training.model.memory import groups_of

_MARK, _BASE = "_atoll_frozen", "_atoll_base"
"""The attributes of a model with the names of its frozen tensors, and with the files of their values."""


def keep_frozen(model: torch.nn.Module) -> None:
    """Exclude the frozen tensors of a model from exchange: from now on only trained ones are sent (`frozen_of`).

    Raises:
        TaskBroken: no parameter is trained, or a trained tensor shares memory with a frozen one.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskBroken(
            f'{type(model).__name__} has no parameter to train, and with Task(travels="trained") nothing else is '
            "exchanged: leave requires_grad of some parameters True, such as those of an adapter"
        )
    trained = trained_names(model)
    every = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    in_memory = {name: t for name, t in every.items() if t.layout == torch.strided and not t.is_meta}
    group = groups_of(in_memory)
    moving = {group[name] for name in group if name in trained}
    if shared := [name for name in group if name not in trained and group[name] in moving]:
        raise TaskBroken(
            f"{', '.join(shared)}: frozen, and a trained tensor has the same memory; give the trained one separate "
            "memory (clone()), or train both"
        )
    setattr(model, _MARK, frozenset(every.keys() - trained))


def frozen_of(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the frozen tensors in a model's state_dict, which are not exchanged."""
    found: frozenset[str] = getattr(model, _MARK, frozenset())
    return found


def trained_names(model: torch.nn.Module) -> set[str]:
    """Return the names in the state_dict of the tensors that training changes; a shared tensor has several."""
    names: set[str] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        found = [name for name, p in module._parameters.items() if p is not None and p.requires_grad]
        if found or isinstance(module, _NormBase):
            found += [name for name, buffer in module._buffers.items() if buffer is not None]
        names.update(f"{prefix}.{name}".lstrip(".") for name in found)
    return names & model.state_dict().keys()


def load_base(model: torch.nn.Module, base: Base, context: Context) -> None:
    """Load the values of its base into a model of which only the trained part is exchanged.

    Raises:
        BaseRefused: the files do not fit the model, which is unchanged; the message lists all differences.
        TaskBroken: an adapter of the model needs the base's values when it is made.
    """
    matched = match_base(model, base, context)
    load(model, matched)
    setattr(model, _BASE, matched)


def match_base(model: torch.nn.Module, base: Base, context: Context) -> Matched:
    """Return the files of the values of a model, also on meta; arguments and errors as for `load_base`."""
    if faults := base_faults(model):
        raise TaskBroken(*faults)
    return match(base, context, *tensors_of(model), frozen_of(model))


def frozen_digest(model: torch.nn.Module, cache: Path | None = None) -> str:
    """Return the digest of a model's frozen tensors, each under its first name, or "".

    Args:
        model: the model with its first values.
        cache: the file with the cached lines of the base's files (`kept_lines`).
    """
    frozen = frozen_of(model)
    tensors = {name: tensor for name, tensor in tensors_of(model)[0].items() if name in frozen}
    matched: Matched | None = getattr(model, _BASE, None)
    lines = matched.lines(tensors, cache) if matched is not None else {}
    lines |= {name: line_of(tensor) for name, tensor in tensors.items() if name not in lines}
    return digest_of(lines) if lines else ""


class Unchanged:
    """The frozen tensors of a model, which nothing may change: the change would reach no other site.

    Args:
        tensors: () -> the present frozen tensors, with their names.
    """

    def __init__(self, tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._tensors = tensors
        self._seen = [(name, tensor, tensor._version) for name, tensor in tensors()]

    def has_same_values(self) -> bool:
        """Return whether all frozen tensors have their values, in place or as copies on another device."""
        now = dict(self._tensors()) if self._seen else {}
        return all(
            one._version == seen and (now[name] is one or torch.equal(now[name].cpu(), one.cpu()))
            for name, one, seen in self._seen
            if name in now
        )

    def check(self) -> None:
        """Check that no tensor has changed.

        Raises:
            TaskBroken: some have changed; the message names the tensors that were written or replaced.
        """
        now = dict(self._tensors()) if self._seen else {}
        changed = [name for name, one, seen in self._seen if now.get(name) is not one or one._version != seen]
        if changed:
            raise TaskBroken(
                f"{', '.join(changed)}: training or evaluation changes them, and with "
                'Task(travels="trained") only parameters with requires_grad and the buffers of their modules are '
                "exchanged: register them in such a module, or keep them out of the model's state "
                "(register_buffer(..., persistent=False))"
            )


def frozen_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the frozen tensors of a model, each under all of its names."""
    frozen = frozen_of(model)
    return ((name, tensor) for name, tensor in model.state_dict(keep_vars=True).items() if name in frozen)

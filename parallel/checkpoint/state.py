"""The contents of a checkpoint of a model and its optimizers, under names that are independent of the mesh.

    model/NAME           a parameter or buffer
    optimizer/NAME/KEY   a tensor of the optimizer's state for that parameter, such as exp_avg
    values/NAME          the rest of that state, numbers and the settings of its group: JSON, as bytes
    slot/KIND/NAME       a tensor of the parameter's shape with another owner, such as DiLoCo's momentum

NAME is the tensor's name in the whole, unwrapped model. A rank has some of the names (each stage of a pipeline has
some) and of each tensor some part (a DTensor's shard); PyTorch writes each part once. When loading, every rank reads
the names that it has.

Tied weights are stored once, under the first of their names. Within a part, two names of a parameter are recognized;
for copies that a pipeline has put on different ranks, `tied` lists the names. The copies are equal then, and so is the
state of their optimizers.

Saving changes nothing: PyTorch's `get_optimizer_state_dict` takes a step when there is no state yet, which counts for
Adam; so the optimizers' state is taken unchanged, and a parameter without state gets none back.
"""

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.checkpoint.state_dict import _get_fqns, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from atoll.parallel.checkpoint.reading import Saved

MODEL, OPTIMIZER, VALUES, SLOT = "model", "optimizer", "values", "slot"

NOT_SETTINGS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Entries of an optimizer's group that belong to the loading run: its parameters, and the code by which it steps."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter of this rank, and the optimizer that trains it."""

    name: str
    parameter: torch.Tensor
    optimizer: Optimizer
    group: dict[str, Any]
    """The optimizer's group, with its settings."""

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state for the parameter, by key; empty before its first step."""
        state: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return state


@dataclass(slots=True)
class LocalState:
    """The tensors of this rank, under the names of the whole model."""

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """The tensors by name; a name comes twice if the rank has two copies of a tied weight."""
    trained: list[Trained] = field(default_factory=list)
    """The parameters with an optimizer."""
    parameters: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """The parameters under the names of the parts themselves."""
    tied: dict[str, str] = field(default_factory=dict)
    """The first name of a tied weight by each of its further names."""
    buffers: set[str] = field(default_factory=set)
    """Names of the tensors that are no parameters."""
    faults: list[str] = field(default_factory=list)
    """The reasons why tensors cannot be saved or loaded."""


def local_state(
    parts: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    tied: Mapping[str, str],
    without: Collection[str] = (),
) -> LocalState:
    """Return the tensors in the parts of this rank.

    Args:
        parts: the parts with the names of the whole model; wrapped (DDP, activation checkpoints, compiled) or not.
        optimizers: one for each part, in their order; or none, for the model alone.
        tied: the first name of a tied weight by each of its further names (`first_names`); ties within a part are
            found.
        without: names of tensors that are left out: a base's, which its files have.

    Raises:
        ValueError: the numbers of optimizers and parts differ.
    """
    if optimizers and len(optimizers) != len(parts):
        raise ValueError(f"one optimizer for each part: got {len(optimizers)} for {len(parts)}")
    local = LocalState(tied=dict(tied))
    for i, part in enumerate(parts):
        tensors = part.state_dict()
        if tensors and not _is_plain(part):
            tensors = get_model_state_dict(part)
        names = _names_of_parameters(part, local)
        _add_tensors(local, {n: t for n, t in tensors.items() if n not in without}, set(names.values()))
        for group in optimizers[i].param_groups if optimizers else ():
            for parameter in group["params"]:
                if id(parameter) in names:
                    local.trained.append(Trained(names[id(parameter)], parameter, optimizers[i], group))
                else:
                    local.faults.append(f"optimizer {i} trains a parameter that is not in part {i}")
    return local


def first_names(tied: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return the first name of a tied weight by each of its further names, from groups (`engine.ties.tied_names`)."""
    return {name: names[0] for names in tied for name in names[1:]}


def _names_of_parameters(part: nn.Module, local: LocalState) -> dict[int, str]:
    """Return the name of each parameter by its id; add further names to the tied ones."""
    names: dict[int, str] = {}
    is_plain = _is_plain(part)
    for wrapped, parameter in part.named_parameters(remove_duplicate=False):
        (name,) = (wrapped,) if is_plain else _get_fqns(part, wrapped)
        if id(parameter) not in names:
            names[id(parameter)] = local.tied.get(name, name)
            local.parameters.append((name, parameter))
        elif name != names[id(parameter)]:
            local.tied.setdefault(name, names[id(parameter)])
    return names


def _is_plain(part: nn.Module) -> bool:
    """Return whether no wrapper adds to the names in a part.

    torch takes wrappers off the names by itself, and imports its compiler to know which module is compiled: half a
    second at the end of each training, though none is compiled before that import.
    """
    wrappers = (DistributedDataParallel, FullyShardedDataParallel, ActivationWrapper)
    return "torch._dynamo" not in sys.modules and not any(
        isinstance(module, wrappers) or hasattr(module, "_fqn_modifiers") for module in part.modules()
    )


def _add_tensors(local: LocalState, tensors: Mapping[str, Any], parameters: set[str]) -> None:
    seen = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            local.faults.append(f"{name} is a {type(tensor).__name__}, and only tensors can be saved")
            continue
        if tensor.is_meta:
            local.faults.append(f"{name} is on the meta device: give it memory (to_empty) first")
            continue
        first = local.tied.get(name, name)
        if first not in parameters:
            local.buffers.add(first)
        if first not in seen:
            local.tensors.append((first, tensor))
        seen.add(first)


def state_to_save(local: LocalState, slots: Mapping[str, torch.Tensor], replica: int = 0) -> dict[str, torch.Tensor]:
    """Return all tensors to save, by key; add those that cannot be saved to the faults.

    Args:
        local: the `LocalState` of this rank.
        slots: tensors with other owners than the optimizers, by KIND/NAME.
        replica: the index of the copy with these optimizers, if each copy has a separate optimizer state.
    """
    state: dict[str, torch.Tensor] = {}
    for slot, tensor in slots.items():
        kind, _, name = slot.partition("/")
        state.setdefault(f"{SLOT}/{kind}/{local.tied.get(name, name)}", tensor)
    for name, tensor in local.tensors:
        state.setdefault(f"{MODEL}/{name}", tensor)
    for trained in local.trained:
        numbers = {}
        for key, value in trained.state.items():
            if isinstance(value, torch.Tensor):
                state.setdefault(f"{_optimizer_key(replica)}/{trained.name}/{key}", value)
            else:
                numbers[key] = value
        settings = {key: _plain(value) for key, value in trained.group.items() if key not in NOT_SETTINGS}
        values = {"optimizer": type(trained.optimizer).__name__, "numbers": numbers, "settings": settings}
        try:
            state.setdefault(f"{VALUES}/{trained.name}", as_bytes(values))
        except TypeError as error:
            local.faults.append(f"the state of {type(trained.optimizer).__name__} for {trained.name}: {error}")
    return state


def _optimizer_key(replica: int) -> str:
    return f"{OPTIMIZER}.{replica}" if replica else OPTIMIZER


def as_bytes(value: Any) -> torch.Tensor:
    """Return a JSON value as a tensor of bytes; TypeError for any other value."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    """Return a setting as a number: a learning rate may be a tensor, so that a captured graph reads it."""
    return value.item() if isinstance(value, torch.Tensor) else value


class Loading:
    """The loading of a checkpoint into the tensors of this rank, in three steps, between which the ranks can agree.

    check()     compares names, shapes, dtypes and optimizers, and changes nothing
    prepare()   lets the optimizers create state that they create late, and determines where all of it goes
    fill()      reads
    """

    def __init__(self, local: LocalState, saved: Saved, replica: int = 0) -> None:
        self._local, self.saved = local, saved
        self.slots: dict[str, torch.Tensor] = {}
        self._optimizer = _optimizer_key(replica if saved.names(_optimizer_key(replica)) else 0)
        self.names = sorted({name for name, _ in local.tensors})
        self._targets: list[dict[str, torch.Tensor]] = []
        self._values: dict[str, dict[str, Any]] = {}
        self._keys = _keys_by_name(saved.names(self._optimizer))

    def check(self) -> list[str]:
        """List the differences between this rank's tensors and the checkpoint.

        Raises:
            CheckpointBroken: a file cannot be read.
        """
        faults = list(self._local.faults)
        for name, tensor in self._local.tensors:
            faults += self._differences(name, f"{MODEL}/{name}", tensor)
            self._aim(f"{MODEL}/{name}", tensor)
        keys = {trained.name: f"{VALUES}/{trained.name}" for trained in self._local.trained}
        saved = {name: key for name, key in keys.items() if key in self.saved.entries}
        self._values = dict(zip(saved, self.saved.read_values(saved.values()), strict=True))
        for trained in self._local.trained:
            if trained.name not in saved:
                faults.append(f"no optimizer trained {trained.name}")
                continue
            before, now = self._values[trained.name]["optimizer"], type(trained.optimizer).__name__
            if before != now:
                faults.append(f"{trained.name} was trained with {before}, here with {now}")
        return faults

    def prepare(self) -> list[str]:
        """List the faults of the saved optimizer state. Every optimizer without state takes a step of length zero."""
        faults = []
        for optimizer in dict.fromkeys(trained.optimizer for trained in self._local.trained):
            if self._keys and not optimizer.state:
                _step_of_zero(optimizer)
        for trained in self._local.trained:
            numbers = self._values[trained.name]["numbers"]
            keys = self._keys.get(trained.name, [])
            state = {key: self._target_of(trained, key) for key in keys} | numbers
            for key in keys:
                entry = f"{self._optimizer}/{trained.name}/{key}"
                faults += self._differences(f"{key} of {trained.name}", entry, state[key])
                self._aim(entry, state[key])
            trained.optimizer.state.pop(trained.parameter, None)
            if state:
                trained.optimizer.state[trained.parameter] = state
        return faults + self._set_settings() + self._prepare_slots()

    def fill(self) -> None:
        """Read all tensors into their targets.

        Raises:
            CheckpointBroken: a file cannot be read.
        """
        for targets in self._targets:
            self.saved.read(targets)

    def _differences(self, what: str, key: str, tensor: torch.Tensor) -> list[str]:
        entry = self.saved.entries.get(key)
        if entry is None:
            return [f"{what} is missing in the checkpoint"]
        if entry.shape != tuple(tensor.shape) or entry.dtype != tensor.dtype:
            dtype = str(tensor.dtype).removeprefix("torch.")
            return [f"{what} is {entry} in the checkpoint, here {dtype} {tuple(tensor.shape)}"]
        return []

    def _aim(self, key: str, tensor: torch.Tensor) -> None:
        """Register the tensor that receives a key's values; a tied weight's second copy is read in a separate pass."""
        for targets in self._targets:
            if key not in targets:
                targets[key] = tensor
                return
        self._targets.append({key: tensor})

    def _target_of(self, trained: Trained, key: str) -> torch.Tensor:
        """Return the optimizer's tensor; if it creates one later, one like the parameter or of the saved shape."""
        present = trained.state.get(key)
        if isinstance(present, torch.Tensor):
            return present
        entry = self.saved.entries[f"{self._optimizer}/{trained.name}/{key}"]
        if entry.shape == tuple(trained.parameter.shape):
            return torch.zeros_like(trained.parameter, dtype=entry.dtype)
        return torch.zeros(entry.shape, dtype=entry.dtype, device=trained.parameter.device)

    def _prepare_slots(self) -> list[str]:
        faults = []
        for kind in sorted({slot.partition("/")[0] for slot in self.saved.names(SLOT)}):
            for name, parameter in self._local.parameters:
                entry = f"{SLOT}/{kind}/{self._local.tied.get(name, name)}"
                if entry in self.saved.entries:
                    slot = torch.zeros_like(parameter.detach(), dtype=self.saved.entries[entry].dtype)
                    faults += self._differences(f"{kind} of {name}", entry, slot)
                    self._aim(entry, slot)
                    self.slots[f"{kind}/{name}"] = slot
        return faults

    def _set_settings(self) -> list[str]:
        """Restore the settings of each group; the parameters of one group must have had the same."""
        faults = []
        first: dict[int, Trained] = {}
        for trained in self._local.trained:
            settings = self._values[trained.name]["settings"]
            leader = first.setdefault(id(trained.group), trained)
            if settings != self._values[leader.name]["settings"]:
                faults.append(f"{trained.name} and {leader.name}, of one group here, were trained with other settings")
            for key, value in settings.items() if leader is trained else ():
                _set(trained.group, key, value)
        return faults


def _keys_by_name(entries: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys of the optimizer's saved tensors by parameter; from NAME/KEY."""
    keys: dict[str, list[str]] = {}
    for entry in entries:
        name, _, key = entry.rpartition("/")
        keys.setdefault(name, []).append(key)
    return keys


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    present = group.get(key)
    if isinstance(present, torch.Tensor):
        present.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(present, tuple) else value


def _step_of_zero(optimizer: Optimizer) -> None:
    """Take a step with zero gradients and a learning rate of zero, so that an optimizer creates its state."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate

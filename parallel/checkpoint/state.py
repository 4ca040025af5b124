"""What a checkpoint holds of a model and its optimizers, under names that no mesh has a say in.

    model/NAME           a parameter or buffer
    optimizer/NAME/KEY   a tensor that the optimizer keeps for that parameter, such as exp_avg
    values/NAME          what else it has for it, numbers and the settings of its group: JSON, as bytes
    slot/KIND/NAME       a tensor of the parameter's shape that another keeps, such as DiLoCo's momentum

NAME is the one that the whole, unwrapped model gives the tensor. A rank has some of the names (a pipeline's stages have
theirs) and of each tensor some part (a DTensor's shard); PyTorch writes each part once. Loading goes the other way:
every rank picks the names that it has.

Tied weights are stored once, under the first of their names. A part that has a parameter under two names shows that it
has; where a pipeline has put copies on different ranks, `tied` says it. The copies are equal then, and so is what the
optimizers keep for them.

Saving changes nothing: PyTorch's `get_optimizer_state_dict` takes a step when there is no state yet, which counts for
Adam; so the optimizers' state is taken as it is, and a parameter that has none gets none back.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns, get_model_state_dict
from torch.optim import Optimizer

from atoll.parallel.checkpoint.reading import Saved

MODEL, OPTIMIZER, VALUES, SLOT = "model", "optimizer", "values", "slot"

NOT_SETTINGS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""What an optimizer's group says of which parameters it has and by which code it steps: that is the loading run's."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter of this rank, and who trains it."""

    name: str
    parameter: torch.Tensor
    optimizer: Optimizer
    group: dict[str, Any]
    """The optimizer's own, with its settings."""

    @property
    def kept(self) -> dict[str, Any]:
        """What the optimizer keeps for the parameter, by key; empty before its first step."""
        kept: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return kept


@dataclass(slots=True)
class Held:
    """What this rank has of the model, under the names of the whole model."""

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """A name is here twice if the rank has two copies of a tied weight."""
    trained: list[Trained] = field(default_factory=list)
    parameters: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Under the names that the parts themselves have for them."""
    tied: dict[str, str] = field(default_factory=dict)
    """Of each further name of a tied weight, the first one."""
    buffers: set[str] = field(default_factory=set)
    """Names of those that are no parameters."""
    faults: list[str] = field(default_factory=list)
    """What cannot be saved or loaded."""


def held_by(parts: Sequence[nn.Module], optimizers: Sequence[Optimizer], tied: Mapping[str, str]) -> Held:
    """What the parts of this rank hold.

    Args:
        parts: with the names of the whole model; wrapped (DDP, activation checkpoints, compiled) or not.
        optimizers: one for each part, in their order; or none, and only the model is looked at.
        tied: of each further name of a tied weight, the first one (`first_names`); ties within a part are found.

    Raises:
        ValueError: not as many optimizers as parts.
    """
    if optimizers and len(optimizers) != len(parts):
        raise ValueError(f"one optimizer for each part: got {len(optimizers)} for {len(parts)}")
    held = Held(tied=dict(tied))
    for i, part in enumerate(parts):
        tensors = get_model_state_dict(part) if part.state_dict() else {}
        names = _names_of_parameters(part, held)
        _add_tensors(held, tensors, set(names.values()))
        for group in optimizers[i].param_groups if optimizers else ():
            for parameter in group["params"]:
                if id(parameter) in names:
                    held.trained.append(Trained(names[id(parameter)], parameter, optimizers[i], group))
                else:
                    held.faults.append(f"optimizer {i} trains a parameter that part {i} has not")
    return held


def first_names(tied: Iterable[Sequence[str]]) -> dict[str, str]:
    """Of each further name of a tied weight, the first one; from groups of names (`engine.ties.tied_names`)."""
    return {name: names[0] for names in tied for name in names[1:]}


def _names_of_parameters(part: nn.Module, held: Held) -> dict[int, str]:
    """The name of each parameter by its id; further names are put with the tied ones."""
    names: dict[int, str] = {}
    for wrapped, parameter in part.named_parameters(remove_duplicate=False):
        (name,) = _get_fqns(part, wrapped)
        if id(parameter) not in names:
            names[id(parameter)] = held.tied.get(name, name)
            held.parameters.append((name, parameter))
        elif name != names[id(parameter)]:
            held.tied.setdefault(name, names[id(parameter)])
    return names


def _add_tensors(held: Held, tensors: Mapping[str, Any], parameters: set[str]) -> None:
    seen = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            held.faults.append(f"{name} is a {type(tensor).__name__}, and only tensors can be saved")
            continue
        if tensor.is_meta:
            held.faults.append(f"{name} is on the meta device: give it memory (to_empty) first")
            continue
        first = held.tied.get(name, name)
        if first not in parameters:
            held.buffers.add(first)
        if first not in seen:
            held.tensors.append((first, tensor))
        seen.add(first)


def state_to_save(held: Held, slots: Mapping[str, torch.Tensor], replica: int = 0) -> dict[str, torch.Tensor]:
    """All that is to be saved, by key; what cannot be is added to the faults.

    Args:
        held: by this rank.
        slots: what others than the optimizers keep, by KIND/NAME.
        replica: which copy's optimizers these are, when each copy's have a state of their own.
    """
    state: dict[str, torch.Tensor] = {}
    for slot, tensor in slots.items():
        kind, _, name = slot.partition("/")
        state.setdefault(f"{SLOT}/{kind}/{held.tied.get(name, name)}", tensor)
    for name, tensor in held.tensors:
        state.setdefault(f"{MODEL}/{name}", tensor)
    for trained in held.trained:
        numbers = {}
        for key, value in trained.kept.items():
            if isinstance(value, torch.Tensor):
                state.setdefault(f"{_of(replica)}/{trained.name}/{key}", value)
            else:
                numbers[key] = value
        settings = {key: _plain(value) for key, value in trained.group.items() if key not in NOT_SETTINGS}
        values = {"optimizer": type(trained.optimizer).__name__, "numbers": numbers, "settings": settings}
        try:
            state.setdefault(f"{VALUES}/{trained.name}", as_bytes(values))
        except TypeError as error:
            held.faults.append(f"what {type(trained.optimizer).__name__} keeps for {trained.name}: {error}")
    return state


def _of(replica: int) -> str:
    return f"{OPTIMIZER}.{replica}" if replica else OPTIMIZER


def as_bytes(value: Any) -> torch.Tensor:
    """A value of JSON as a tensor of bytes; TypeError when it is none."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    """A learning rate may be a tensor, so that a captured graph reads it."""
    return value.item() if isinstance(value, torch.Tensor) else value


class Loading:
    """Puts what a checkpoint has into what this rank holds, in three steps, so that the ranks can agree in between.

    check()     compares names, shapes, dtypes and optimizers, and changes nothing
    prepare()   lets the optimizers make the state that they make late, and says where all of it goes
    fill()      reads
    """

    def __init__(self, held: Held, saved: Saved, replica: int = 0) -> None:
        self._held, self.saved = held, saved
        self.slots: dict[str, torch.Tensor] = {}
        self._optimizer = _of(replica if saved.names(_of(replica)) else 0)
        self.names = sorted({name for name, _ in held.tensors})
        self._targets: list[dict[str, torch.Tensor]] = []
        self._values: dict[str, dict[str, Any]] = {}
        self._keys = _keys_by_name(saved.names(self._optimizer))

    def check(self) -> list[str]:
        """What of this rank's the checkpoint has not, or has otherwise.

        Raises:
            CheckpointBroken: a file cannot be read.
        """
        faults = list(self._held.faults)
        for name, tensor in self._held.tensors:
            faults += self._differences(name, f"{MODEL}/{name}", tensor)
            self._aim(f"{MODEL}/{name}", tensor)
        keys = {trained.name: f"{VALUES}/{trained.name}" for trained in self._held.trained}
        there = {name: key for name, key in keys.items() if key in self.saved.entries}
        self._values = dict(zip(there, self.saved.read_values(there.values()), strict=True))
        for trained in self._held.trained:
            if trained.name not in there:
                faults.append(f"no optimizer trained {trained.name}")
                continue
            kind, mine = self._values[trained.name]["optimizer"], type(trained.optimizer).__name__
            if kind != mine:
                faults.append(f"{trained.name} was trained with {kind}, here with {mine}")
        return faults

    def prepare(self) -> list[str]:
        """What of the optimizers' state does not fit. Every optimizer that has no state takes a step of length zero."""
        faults = []
        for optimizer in dict.fromkeys(trained.optimizer for trained in self._held.trained):
            if self._keys and not optimizer.state:
                _step_of_zero(optimizer)
        for trained in self._held.trained:
            numbers = self._values[trained.name]["numbers"]
            keys = self._keys.get(trained.name, [])
            kept = {key: self._place_of(trained, key) for key in keys} | numbers
            for key in keys:
                entry = f"{self._optimizer}/{trained.name}/{key}"
                faults += self._differences(f"{key} of {trained.name}", entry, kept[key])
                self._aim(entry, kept[key])
            trained.optimizer.state.pop(trained.parameter, None)
            if kept:
                trained.optimizer.state[trained.parameter] = kept
        return faults + self._set_settings() + self._prepare_slots()

    def fill(self) -> None:
        """Read everything into its place.

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
        """A second copy of a tied weight is read in a pass of its own."""
        for targets in self._targets:
            if key not in targets:
                targets[key] = tensor
                return
        self._targets.append({key: tensor})

    def _place_of(self, trained: Trained, key: str) -> torch.Tensor:
        """The optimizer's own tensor, or, if it makes one only later, one like the parameter or of the saved shape."""
        there = trained.kept.get(key)
        if isinstance(there, torch.Tensor):
            return there
        entry = self.saved.entries[f"{self._optimizer}/{trained.name}/{key}"]
        if entry.shape == tuple(trained.parameter.shape):
            return torch.zeros_like(trained.parameter, dtype=entry.dtype)
        return torch.zeros(entry.shape, dtype=entry.dtype, device=trained.parameter.device)

    def _prepare_slots(self) -> list[str]:
        faults = []
        for kind in sorted({slot.partition("/")[0] for slot in self.saved.names(SLOT)}):
            for name, parameter in self._held.parameters:
                entry = f"{SLOT}/{kind}/{self._held.tied.get(name, name)}"
                if entry in self.saved.entries:
                    slot = torch.zeros_like(parameter.detach(), dtype=self.saved.entries[entry].dtype)
                    faults += self._differences(f"{kind} of {name}", entry, slot)
                    self._aim(entry, slot)
                    self.slots[f"{kind}/{name}"] = slot
        return faults

    def _set_settings(self) -> list[str]:
        """Each group gets back its settings; the parameters of one group must have had the same."""
        faults = []
        first: dict[int, Trained] = {}
        for trained in self._held.trained:
            settings = self._values[trained.name]["settings"]
            leader = first.setdefault(id(trained.group), trained)
            if settings != self._values[leader.name]["settings"]:
                faults.append(f"{trained.name} and {leader.name}, of one group here, were trained with other settings")
            for key, value in settings.items() if leader is trained else ():
                _set(trained.group, key, value)
        return faults


def _keys_by_name(entries: Iterable[str]) -> dict[str, list[str]]:
    """Of each parameter, the keys of the tensors that its optimizer has kept; from NAME/KEY."""
    keys: dict[str, list[str]] = {}
    for entry in entries:
        name, _, key = entry.rpartition("/")
        keys.setdefault(name, []).append(key)
    return keys


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    there = group.get(key)
    if isinstance(there, torch.Tensor):
        there.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(there, tuple) else value


def _step_of_zero(optimizer: Optimizer) -> None:
    """Let an optimizer make its state, by a step with zero gradients and a learning rate of zero."""
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

"""The hooks of a custom algorithm for the clients of a group: torch.func maps each hook over all of them.

    begin --> [ loss --> gradients --> (optimizer's step) --> after_step ] K times --> end

A hook is called once for the m clients that take a step, with tensors (m, ...) of which it sees one client's. If it
looks at batches, only clients with batches of equal size are mapped together, so that it sees no padding; at the end,
only clients with equal numbers of steps. The values that it sets are copied: the state, shared tensors, attributes of
`client` (k, ...).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch.func import vmap

from atoll.simulations.engines.batched.mapped_client import Attributes, Common, Groups, MappedClient
from atoll.simulations.engines.batched.measures import Sizes
from atoll.simulations.engines.batched.nets import Net
from atoll.simulations.engines.batched.outputs import by_client, filled
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.engine import Training
from atoll.task.algorithm import HOOKS, Algorithm
from atoll.task.arrays import Arrays, check_finite
from atoll.task.context import Context
from atoll.task.local import Local
from atoll.task.randomness import states_of_generators
from atoll.task.task import Task
from atoll.tensors.layout import SHARED, STATE
from atoll.training.data.trees import tensors
from atoll.training.local.client import Tensors, tensors_with
from atoll.training.local.scaffold import split
from atoll.training.model.as_built import AsBuilt
from atoll.training.model.parameters import build_model, load_parameters, state_of, trained_by_name
from atoll.training.trials.contract import one_loss

DTYPES = (torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes of a state that are stored unchanged."""

WAY_OUT = "change the hook, or train with the engines sequential and processes, which call it unchanged"

KEPT = ("state", "shared", "attributes")
"""Groups of tensors that hooks set."""

Rows = slice | torch.Tensor

Run = Callable[[MappedClient, Groups], Tensors]
"""Function (client, its tensors) -> what a hook returns for this client, by name."""


class HookRefused(CannotBatch):
    """Error: no group of clients supports a hook, whatever the net; the message names it."""


class LooksAtBatch(Exception):
    """Signal: a hook unexpectedly looks at batches, and the clients' batches differ in size; the group restarts."""


@dataclass(frozen=True, slots=True)
class Part:
    """Clients for which a hook is called at once."""

    rows: Rows

    batch: Tensors | None
    """Their inputs and targets, and the outputs if computed, (m, n, ...); None: the hook sees no batch."""

    num_steps: int


class Hooks:
    """Hooks of a task's algorithm, each called for many clients at once.

    Args:
        training: the settings of all clients' training.
    """

    def __init__(self, training: Training) -> None:
        assert isinstance(training.task, Task)
        self._task, self._algorithm = training.task, training.task.algorithm
        self._device, self._local = training.device, training.local
        self._hooks: dict[str, Callable[..., Any]] = _own_hooks(self._algorithm)
        self._model = build_model(self._task, training.model_seed).to(training.device).train()
        self._looking: set[str] = set()

    @property
    def has_loss(self) -> bool:
        """Whether the algorithm has a custom loss."""
        return "loss" in self._hooks

    def begin_round(self, version: Arrays, local: Local) -> None:
        """Set the version that the next clients train from, and the settings of the round."""
        self._version, self._local = version, local
        self._first: Tensors | None = None
        self._load()

    def _load(self) -> None:
        load_parameters(self._model, split(self._version)[0])
        self._start = {name: tensor.detach().clone() for name, tensor in state_of(self._model).items()}
        self._received = tensors_with(SHARED, self._version, self._device)

    # ------------------------------------------------------------ a group

    def begin(self, context: Context, net: Net, owns: Sequence[Arrays | None]) -> None:
        """Begin the trainings of a new group of clients.

        Args:
            context: its fields that all clients share.
            net: holds the starting weights of all clients.
            owns: state that each client has kept from its last training; None: nothing yet.

        Raises:
            HookRefused: `begin` cannot be mapped, or the state cannot be stored.
        """
        self._context, self._net, self._count, self._done = context, net, len(owns), 0
        self._held, self._drawn = AsBuilt({"": self._algorithm}), states_of_generators()
        self._batch: Tensors | None = None
        self._shared = {name: _repeated(tensor, self._count) for name, tensor in self._received.items()}
        self._state, self._attributes = self._states(owns), Attributes(self._count)
        net.stack.take(self._count)
        if "begin" in self._hooks:
            self._call("begin", self._follow("begin"), Part(slice(0, self._count), None, 0))

    def take(self, inputs: torch.Tensor, targets: torch.Tensor, sizes: Sizes) -> None:
        """Set the batch of the next step, (m n, ...)."""
        self._sizes = sizes
        self._batch = {"inputs": self._by_client(inputs), "targets": self._by_client(targets)}

    def losses(self, outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of the task and of the algorithm (m,), from outputs, a tree of tensors (m n, ...)."""
        given = {f"outputs {n}": self._by_client(tensor) for n, tensor in enumerate(tensors(outputs))}

        def run(client: MappedClient, own: Groups) -> Tensors:
            mine = filled(outputs, (own["batch"][name] for name in given))
            loss = one_loss(self._task.loss(mine, client.targets))
            return {"task": loss, "own": one_loss(self._hooks["loss"](client, loss, mine))}

        assert self._batch is not None
        parts = self._parts("loss", self._batch | given)
        found = [self._call("loss", run, part) for part in parts]
        together = (torch.cat([each[name] for each in found]) for name in ("task", "own"))
        if len(parts) > 1:
            back = torch.argsort(torch.cat([part.rows for part in parts if isinstance(part.rows, torch.Tensor)]))
            together = (losses[back] for losses in together)
        of_task, own = together
        return of_task, own

    @torch.no_grad()
    def change_gradients(self, gradients: Tensors) -> None:
        """Replace the gradients (m, ...) of all parameters in place.

        Raises:
            HookRefused: the hook cannot be mapped, or omits a gradient.
        """
        if "gradients" not in self._hooks:
            return
        names = list(trained_by_name(self._model))
        given = {name: gradients[name] for name in names}

        def run(client: MappedClient, own: Groups) -> Tensors:
            found = self._hooks["gradients"](client, dict(own["gradients"]))
            if faults := [n for n in names if n not in found or found[n].shape != own["gradients"][n].shape]:
                raise CannotBatch(f"returns no gradient of {', '.join(faults)}, or one of another shape")
            return {name: found[name] for name in names}

        for part in self._parts("gradients", self._batch):
            for name, value in self._call("gradients", run, part, given).items():
                given[name][part.rows] = value.to(given[name].dtype)

    @torch.no_grad()
    def stepped(self) -> None:
        """Count a step, and call the algorithm's hook `after_step`."""
        self._done += 1
        if "after_step" in self._hooks:
            for part in self._parts("after_step", self._batch):
                self._call("after_step", self._follow("after_step"), part)

    def end(self, steps: Sequence[int]) -> None:
        """End the trainings.

        Args:
            steps: the number of steps of each client (k), in descending order.

        Raises:
            HookRefused: a hook cannot be mapped, draws random numbers, or keeps a state outside of `client`.
        """
        self._net.stack.take(self._count)
        self._batch = None
        self._attributes.freeze(self._count)
        if "end" in self._hooks:
            numbers = np.array(steps)
            for number in sorted(set(steps)):
                (at,) = np.nonzero(numbers == number)
                part = Part(slice(int(at[0]), int(at[-1]) + 1), None, number)
                self._call("end", self._follow("end"), part)
        self._check_traces()
        self._sent = {name: (now - self._received[name]).cpu().numpy() for name, now in self._shared.items()}
        self._kept = {STATE + name: tensor.cpu().numpy() for name, tensor in self._state.items()}

    def write(self, row: int, update: Arrays, own: Arrays) -> None:
        """Write the shared tensors and the state of a client into its row.

        Raises:
            NotFinite: the state is not finite.
        """
        for name in self._received:
            update[SHARED + name][...] = self._sent[name][row]
        kept = {name: tensors[row] for name, tensors in self._kept.items()}
        check_finite(kept, "client's state")
        for name, array in kept.items():
            own[name][...] = array

    # ------------------------------------------------------------ a call

    def _call(self, hook: str, run: Run, part: Part, gradients: Mapping[str, torch.Tensor] = {}) -> Tensors:
        """Call a hook for the clients of a part, and copy what it sets; return what it returns, (m, ...).

        Raises:
            HookRefused: torch.func cannot map it, or it would behave differently for one client alone.
        """
        stored = self._stored()
        groups = {group: {name: t[part.rows] for name, t in tensors.items()} for group, tensors in stored.items()}
        groups["gradients"] = {name: tensor[part.rows] for name, tensor in gradients.items()}
        groups |= {} if part.batch is None else {"batch": part.batch}
        places = [(group, name) for group, tensors in groups.items() for name in tensors]
        common = self._common(part.num_steps)
        keys: list[tuple[str, str]] = []

        def alone(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own: Groups = {group: {} for group in groups}
            for (group, name), tensor in zip(places, tensors, strict=True):
                own[group][name] = tensor
            client = MappedClient(common, own, lambda: self._batch_of(hook, own), self._attributes.of(own))
            returned = run(client, own)
            values = {("returned", name): tensor for name, tensor in returned.items()} | _set_by(client, own)
            if hook != "end":  # nothing reads them afterwards
                values |= self._attributes.set_by(client, own)
            keys.extend(values)
            return tuple(values.values())

        versions = _versions(groups), _versions({"": self._start | self._received})
        try:
            with warnings.catch_warnings():  # about the slow path for operations without a rule, which `auto` measures
                warnings.filterwarnings("ignore", "There is a performance drop")
                values = vmap(alone)(*_flat(groups))
            found = dict(zip(keys, values, strict=True))
            self._check_memory(hook, groups, versions, found, is_copy=not isinstance(part.rows, slice))
            self._keep(part.rows, groups, versions[0], found)
        except LooksAtBatch:
            raise
        except CannotBatch as error:
            self._refuse(hook, str(error))
        except Exception as error:  # the user's code runs here and may raise anything
            text = (str(error).strip().splitlines() or [""])[0].partition(". ")[0]
            self._refuse(hook, f"cannot be mapped over clients by torch.func ({type(error).__name__}: {text})")
        return {name: value for (group, name), value in found.items() if group == "returned"}

    def _follow(self, hook: str) -> Run:
        """Return a function that calls a hook and discards its result."""

        def run(client: MappedClient, _: Groups) -> Tensors:
            self._hooks[hook](client)
            return {}

        return run

    def _refuse(self, hook: str, reason: str) -> NoReturn:
        self._load()  # tensors that it may have changed in place
        name = ".".join(filter(None, (type(self._algorithm).__name__, hook)))
        raise HookRefused(f"task.algorithm: {name} {reason}; {WAY_OUT}") from None

    def _common(self, num_steps: int) -> Common:
        return Common(self._task, self._model, self._local, self._context, self._start, self._received, num_steps)

    def _stored(self) -> Groups:
        """Return the memory of the tensors that each client has separately, (k, ...) or (m, ...)."""
        weights = self._net.stack.weights
        return {
            "parameters": {name: weights[name] for name in trained_by_name(self._model)},
            "buffers": self._net.running.tensors(),
            "state": self._state,
            "shared": self._shared,
            "attributes": self._attributes.tensors(),
        }

    def _check_memory(
        self,
        hook: str,
        groups: Groups,
        versions: tuple[dict[str, int], dict[str, int]],
        found: Mapping[tuple[str, str], torch.Tensor],
        *,
        is_copy: bool,
    ) -> None:
        """Check that a hook changes no memory in place whose change would reach other clients, or get lost.

        Raises:
            CannotBatch: the hook changes such memory.
        """
        if _versions({"": self._start | self._received}) != versions[1]:
            raise CannotBatch("changes client.start or client.received in place, which all clients share")
        moved = {name for name, version in _versions(groups).items() if version != versions[0][name]}
        if hook == "loss" and (names := [name for name in moved if name.startswith(("parameters ", "buffers "))]):
            raise CannotBatch(f"changes {names[0].partition(' ')[2]} in place, before the gradient is taken")
        if is_copy and any(name.startswith("batch ") for name in moved):
            raise CannotBatch("changes the batch in place")
        if hook == "end":
            return
        if self._local.clip_norm is not None:
            kept = {_memory(value) for (group, _), value in found.items() if group != "returned"}
            kept |= {_memory(tensor) for group in KEPT for tensor in groups[group].values()}
            if any(_memory(value) in kept for (group, _), value in found.items() if group == "returned"):
                raise CannotBatch("returns a tensor that the client keeps, and local.clip_norm clips it: clone() it")
        moving = {_memory(t) for group in ("parameters", "buffers", "gradients") for t in groups[group].values()}
        for (group, name), value in found.items():
            if group != "returned" and _memory(value) in moving:
                raise CannotBatch(
                    f"sets {_named(group, name)} to a view of a parameter or gradient, which changes: clone() it"
                )
        self._check_attributes(groups, found)

    def _check_attributes(self, groups: Groups, found: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Check that no attribute, which is copied, shares memory with another tensor: the copy would not follow it.

        Raises:
            CannotBatch: an attribute shares memory.
        """
        kept = {(group, name): tensor for group in KEPT for name, tensor in groups[group].items()}
        kept |= {place: tensor for place, tensor in found.items() if place[0] != "returned"}
        common = [*self._start.values(), *self._received.values()]
        uses = Counter(_memory(tensor) for tensor in (*kept.values(), *common))
        for (group, name), tensor in kept.items():
            if group == "attributes" and tensor.numel() and uses[_memory(tensor)] > 1:
                raise CannotBatch(f"sets {_named(group, name)} to a view of another tensor of client: clone() it")

    def _keep(
        self, rows: Rows, groups: Groups, versions: Mapping[str, int], found: Mapping[tuple[str, str], torch.Tensor]
    ) -> None:
        """Copy what a hook has set, and what it has changed in place, to the memory of all clients."""
        stored = self._stored()
        if not isinstance(rows, slice):
            now = _versions(groups)
            for group, tensors in stored.items():
                for name, tensor in tensors.items():
                    if now[f"{group} {name}"] != versions[f"{group} {name}"]:
                        tensor[rows] = groups[group][name].detach()
        values = {place: value.detach().clone() for place, value in found.items() if place[0] != "returned"}
        stored["attributes"] = self._attributes.with_room(values)
        for (group, name), value in values.items():
            place = stored[group][name]
            if (value.shape[1:], value.dtype) != (place.shape[1:], place.dtype):
                is_now, was = ((tuple(t.shape[1:]), t.dtype) for t in (value, place))
                raise CannotBatch(f"sets {_named(group, name)} to {is_now}; before, it was {was}")
            place[rows] = value

    # ------------------------------------------------------------ the clients

    def _parts(self, hook: str, batch: Tensors | None) -> list[Part]:
        """Return the groups of clients that take the step."""
        assert batch is not None
        sizes = self._sizes
        self._attributes.freeze(len(sizes))
        if (sizes == batch["inputs"].shape[1]).all():
            return [Part(slice(0, len(sizes)), batch, self._done)]
        if hook != "loss" and hook not in self._looking:
            return [Part(slice(0, len(sizes)), None, self._done)]
        parts = []
        for length in np.unique(sizes).tolist():
            rows = torch.from_numpy(np.flatnonzero(sizes == length)).to(self._device)
            parts.append(Part(rows, {name: t[rows, :length] for name, t in batch.items()}, self._done))
        return parts

    def _batch_of(self, hook: str, own: Groups) -> tuple[Any, Any]:
        """Return inputs and targets of one client, as if it trained alone."""
        if "batch" in own:
            return own["batch"]["inputs"], own["batch"]["targets"]
        if hook == "begin":
            return None, None
        if hook == "end":
            raise CannotBatch("looks at the last batch, which may be another step's for each client")
        self._looking.add(hook)
        raise LooksAtBatch(hook)

    def _by_client(self, tensor: torch.Tensor) -> torch.Tensor:
        divided: torch.Tensor = by_client(tensor, len(self._sizes))
        return divided

    def _states(self, owns: Sequence[Arrays | None]) -> Tensors:
        """Return the state of all clients, (k, ...) by name."""
        kept = [tensors_with(STATE, own or {}, self._device) for own in owns]
        if not all(kept) and self._first is None:
            found = self._hooks["state"](self._model) if "state" in self._hooks else {}
            self._first = {name: tensor.detach().clone() for name, tensor in found.items()}
            if faults := [f"{n} is {t.dtype}" for n, t in self._first.items() if t.dtype not in DTYPES]:
                self._refuse("state", f"returns {', '.join(faults)}; only float32 and whole numbers can be batched")
        first = self._first or {}
        every = [own or first for own in kept]
        return {name: torch.stack([tensors[name] for tensors in every]) for name in every[0]}

    def _check_traces(self) -> None:
        if states_of_generators() != self._drawn:
            self._refuse("", "draws random numbers in a hook, and each client draws others when it trains alone")
        if paths := self._held.differences():
            self._refuse("", f"changes {paths[0]} in a hook: the object is shared by all clients; client.state is not")


def _own_hooks(algorithm: Algorithm | None) -> dict[str, Callable[..., Any]]:
    """Return the hooks that an algorithm overrides, by name."""
    every = {name: getattr(algorithm, name) for name in HOOKS}
    return {n: hook for n, hook in every.items() if getattr(hook, "__func__", None) is not getattr(Algorithm, n)}


def _set_by(client: MappedClient, own: Groups) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors that a hook has set.

    Raises:
        CannotBatch: the names differ from before.
    """
    before = {"state": own["state"], "shared": own["shared"]}
    found: dict[tuple[str, str], torch.Tensor] = {}
    for group, now in (("state", client.state), ("shared", client.shared)):
        if others := sorted(now.keys() ^ before[group].keys()):
            raise CannotBatch(f"adds names to client.{group}, or removes them: {', '.join(others)}")
        found |= {(group, name): t for name, t in now.items() if t is not before[group][name]}
    return found


def _named(group: str, name: str) -> str:
    """Return the name by which a hook's code refers to a tensor."""
    return f"client.{name.partition(' ')[0]}" if group == "attributes" else f"client.{group}, {name},"


def _flat(groups: Groups) -> list[torch.Tensor]:
    return [tensor for tensors in groups.values() for tensor in tensors.values()]


def _versions(groups: Groups) -> dict[str, int]:
    """Return the version counters of tensors, which count changes in place."""
    return {f"{group} {name}": t._version for group, tensors in groups.items() for name, t in tensors.items()}


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _repeated(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor.expand(count, *tensor.shape).clone()

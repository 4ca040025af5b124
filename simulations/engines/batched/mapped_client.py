"""One client of a group, as a hook of a custom algorithm sees it while torch.func maps the hook over all clients.

There, tensors have the values and shapes of this one client. Values that all clients share are the same object for all;
access to a value of one client that is not a tensor is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.simulations.engines.batched.outputs import filled
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.engine import Job
from atoll.task.context import Context
from atoll.task.errors import TaskBroken
from atoll.task.local import Local
from atoll.task.task import Task
from atoll.training.data.trees import children, map_tensors, tensors
from atoll.training.local.client import Tensors, evaluating
from atoll.training.trials.contract import one_loss

COMMON = ("round", "version", "options")

Groups = dict[str, Tensors]
"""Tensors by name, in groups: parameters, buffers, state, shared, attributes, and other arguments of a hook."""

GIVEN = ("_common", "_own", "_batch", "state", "shared")
"""Attributes that a client has before a hook is called."""

PLAIN = (bool, int, float, str, type(None))
"""Types of values that clients may share as attributes."""


class SharedContext(Context):
    """Context that the clients of one group share; see `Context`.

    Args:
        task: the task, with its options.
        job: the job of any of the clients.

    Raises:
        CannotBatch: a field differs between the clients.
    """

    def __init__(self, task: Task, job: Job) -> None:
        super().__init__(round=job.round_id, version=job.version, options=task.options)

    def __getattribute__(self, name: str) -> Any:
        if name == "secret_rng" or (name in Context.__dataclass_fields__ and name not in COMMON):
            raise CannotBatch(f"a function of the task reads context.{name}, which differs between the clients")
        return super().__getattribute__(name)


@dataclass(frozen=True, slots=True)
class Common:
    """Values that the clients of a group share."""

    task: Task

    model: nn.Module
    """Model of the task, used only for its forward pass."""

    local: Local

    context: Context

    start: Tensors

    received: Tensors

    num_steps: int


class MappedClient:
    """Client inside of the map; see `algorithm.Client`.

    Args:
        common: values that all clients share.
        own: the tensors of this client.
        batch: returns its inputs and targets.
        attributes: what hooks have set on it, by name.

    Raises:
        CannotBatch: an attribute does not exist for a client of a group.
    """

    state: Tensors
    shared: Tensors
    _common: Common
    _own: Groups
    _batch: Callable[[], tuple[Any, Any]]

    def __init__(
        self, common: Common, own: Groups, batch: Callable[[], tuple[Any, Any]], attributes: Mapping[str, Any]
    ) -> None:
        mine = {"_common": common, "_own": own, "_batch": batch}
        mine |= {"state": dict(own["state"]), "shared": dict(own["shared"])}
        for name, value in (mine | dict(attributes)).items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "leaves_out":
            raise CannotBatch("sets client.leaves_out, which names tensors client by client")
        if name in GIVEN[:3] or hasattr(MappedClient, name):
            raise CannotBatch(f"sets client.{name}, a reserved name: choose another one")
        object.__setattr__(self, name, value)

    @property
    def model(self) -> NoReturn:
        """Refuse the access: the tensors of all clients exist, but no model of one client."""
        raise CannotBatch(
            "reads client.model, and one client of a group has no model: client.parameters has its tensors, and "
            "client.outputs calls it"
        )

    @property
    def leaves_out(self) -> NoReturn:
        """Refuse the access: the names of one client are not available."""
        raise CannotBatch("reads client.leaves_out, which names tensors client by client")

    @property
    def local(self) -> Local:
        """The settings of the round."""
        return self._common.local

    @property
    def context(self) -> Context:
        """The context, without the fields in which the clients differ."""
        return self._common.context

    @property
    def num_steps(self) -> int:
        """The number of steps that are done."""
        return self._common.num_steps

    @property
    def start(self) -> Mapping[str, torch.Tensor]:
        """The tensors of the model before the training, by name."""
        return MappingProxyType(self._common.start)

    @property
    def received(self) -> Mapping[str, torch.Tensor]:
        """The shared tensors of the version, by name."""
        return MappingProxyType(self._common.received)

    @property
    def parameters(self) -> Tensors:
        """The trained parameters, with their current values."""
        return dict(self._own["parameters"])

    @property
    def inputs(self) -> Any:
        """The inputs of the current batch."""
        return self._batch()[0]

    @property
    def targets(self) -> Any:
        """The targets of the current batch."""
        return self._batch()[1]

    def outputs(self, tensors: Mapping[str, torch.Tensor], inputs: Any = None) -> Any:
        """Return the outputs of the model with other tensors; see `algorithm.Client`."""
        inputs = self.inputs if inputs is None else inputs
        with torch.no_grad(), evaluating(self._common.model), sdpa_kernel(SDPBackend.MATH):
            return functional_call(self._common.model, self._filled(tensors), (inputs,))

    def gradient(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the gradient on the current batch at other parameters; see `algorithm.Client`."""
        filled, (inputs, targets) = self._filled(tensors), self._batch()

        def loss_of(leaves: Tensors) -> torch.Tensor:
            outputs = functional_call(self._common.model, filled | leaves, (inputs,))
            return one_loss(self._common.task.loss(outputs, targets))

        with sdpa_kernel(SDPBackend.MATH):
            return dict(grad(loss_of)({name: filled[name] for name in self._own["parameters"]}))

    def full_gradient(self, tensors: Mapping[str, torch.Tensor]) -> NoReturn:
        """Refuse the call: the clients have different numbers of examples."""
        raise CannotBatch("calls client.full_gradient, over data whose number of examples differs between the clients")

    def full_loss(self, tensors: Mapping[str, torch.Tensor]) -> NoReturn:
        """Refuse the call: it returns a Python number, which differs between the clients."""
        raise CannotBatch("calls client.full_loss, a Python number that differs between the clients")

    def _filled(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the tensors of a forward pass that changes none of these."""
        start, trained = self._common.start, self._own["parameters"]
        if unknown := sorted(tensors.keys() - start.keys()):
            raise TaskBroken(f"{', '.join(unknown)}: not a tensor of the model (its tensors: {', '.join(start)})")
        every = start | self._own["buffers"] | trained | dict(tensors)
        return {name: t.detach() if name in trained else t.detach().clone() for name, t in every.items()}


class Attributes:
    """Attributes that hooks set on `client` until the training ends, for all clients of a group.

    Each is a tree in which every client has its tensors (k, ...), while types, shapes and plain values are common to
    all. So its form may change only while every client still trains.

    Args:
        count: the number of clients, k.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._trees: dict[str, Any] = {}
        self._forms: dict[str, Any] = {}
        self._memory: Tensors = {}
        self.freeze(count)

    def freeze(self, clients: int) -> None:
        """Begin a hook for some clients: all parts of it see the current attributes."""
        self._given, self._given_memory = self._trees, self._memory
        self._may_change, self._set = clients == self._count, (self._trees, self._forms)

    def tensors(self) -> Tensors:
        """Return the tensors (k, ...) of all clients before the hook, by attribute and position in its tree."""
        return dict(self._given_memory)

    def of(self, own: Groups) -> dict[str, Any]:
        """Return the attributes of one client."""
        mine = own["attributes"]
        return {
            name: filled(tree, (mine[place] for place in _places(name, tree))) for name, tree in self._given.items()
        }

    def set_by(self, client: MappedClient, own: Groups) -> dict[tuple[str, str], torch.Tensor]:
        """Return the tensors that a hook has set.

        Raises:
            CannotBatch: an attribute holds something that is neither a tensor nor a plain value.
        """
        trees = {name: value for name, value in vars(client).items() if name not in GIVEN}
        found = {
            ("attributes", place): tensor
            for name, tree in trees.items()
            for place, tensor in zip(_places(name, tree), tensors(tree), strict=True)
            if tensor is not own["attributes"].get(place)
        }
        forms = {name: _form(name, tree) for name, tree in trees.items()}
        self._set = {name: map_tensors(lambda _: _PLACE, tree) for name, tree in trees.items()}, forms
        return found

    def with_room(self, values: Mapping[tuple[str, str], torch.Tensor]) -> Tensors:
        """Return the tensors (k, ...) with room for the values that a part of the clients has set (m, ...).

        Raises:
            CannotBatch: their form differs from other clients'.
        """
        trees, forms = self._set
        if others := sorted(
            name for name in forms.keys() | self._forms.keys() if forms.get(name) != self._forms.get(name)
        ):
            if not self._may_change:
                raise CannotBatch(
                    f"sets client.{others[0]} to types, shapes or plain values that differ from other clients' of a "
                    "group, whose batches differ in size or whose training has ended"
                )
            before, self._trees, self._forms = self._memory, trees, forms
            self._memory = {
                place: before[place] for n, tree in trees.items() for place in _places(n, tree) if place in before
            }
            for place, value in ((place, value) for (group, place), value in values.items() if group == "attributes"):
                self._memory[place] = value.new_empty((self._count, *value.shape[1:]))
        self._may_change = False
        return dict(self._memory)


_PLACE = torch.empty(0)
"""Placeholder for each client's tensor."""


def _places(name: str, tree: Any) -> list[str]:
    return [f"{name} {number}" for number, _ in enumerate(tensors(tree))]


def _form(name: str, tree: Any) -> object:
    """Return the form of an attribute that the clients of a group share.

    Raises:
        CannotBatch: it holds something that is neither a tensor nor a plain value.
    """
    if isinstance(tree, torch.Tensor):
        return tuple(tree.shape), tree.dtype
    parts = children(tree)
    if parts is not None:
        return type(tree), [(repr(key), _form(name, part)) for key, part in parts.items()]
    if not isinstance(tree, PLAIN):
        raise CannotBatch(
            f"sets client.{name}, which holds a {type(tree).__name__}: a group supports tensors and numbers"
        )
    return type(tree), repr(tree)

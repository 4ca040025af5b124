"""One client of a product, as a hook of the task's own algorithm sees it while torch.func maps the hook over them all.

Tensors of the clients are this one's there, of the same shapes as alone. What the clients have in common is the same
object for all; what belongs to one of them and is no tensor is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.parallel.local_training.client import Tensors, evaluating
from atoll.parallel.local_training.one_loss import one_loss
from atoll.parallel.task.context import Context
from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.local import Local
from atoll.parallel.task.task import Task
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.engine import Job

COMMON = ("round", "version", "options")

Groups = dict[str, Tensors]
"""Tensors by name, in groups: parameters, buffers, state, shared, and what a hook gets beside the client."""


class SharedContext(Context):
    """The context of the clients of one product; see `Context`.

    Args:
        task: the task, with its options.
        job: the job of any of the clients.

    Raises:
        CannotBatch: from a field in which the clients differ.
    """

    def __init__(self, task: Task, job: Job) -> None:
        super().__init__(round=job.round_id, version=job.version, options=task.options)

    def __getattribute__(self, name: str) -> Any:
        if name in Context.__dataclass_fields__ and name not in COMMON:
            raise CannotBatch(f"a function of the task reads context.{name}, which differs between the clients")
        return super().__getattribute__(name)


@dataclass(frozen=True, slots=True)
class Common:
    """The values that the clients of a product have in common."""

    task: Task

    model: nn.Module
    """A model of the task, of which the forward pass alone is used."""

    local: Local

    context: Context

    start: Tensors

    received: Tensors

    num_steps: int


class MappedClient:
    """A client inside of the map; see `algorithm.Client`.

    Args:
        common: what all clients have in common.
        own: the tensors of this one.
        batch: returns its inputs and targets.

    Raises:
        CannotBatch: from what a client of a product does not have.
    """

    state: Tensors
    shared: Tensors
    _common: Common
    _own: Groups
    _batch: Callable[[], tuple[Any, Any]]

    def __init__(self, common: Common, own: Groups, batch: Callable[[], tuple[Any, Any]]) -> None:
        mine = {"_common": common, "_own": own, "_batch": batch}
        mine |= {"state": dict(own["state"]), "shared": common.received | own["shared"]}
        for name, value in mine.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("state", "shared"):
            what = "names tensors client by client" if name == "leaves_out" else "is no tensor of client.state"
            raise CannotBatch(f"sets client.{name}, which {what}")
        object.__setattr__(self, name, value)

    @property
    def model(self) -> NoReturn:
        """No model: each tensor is there for all clients."""
        raise CannotBatch(
            "looks at client.model, and a product has no model of one client: client.parameters has its tensors, and "
            "client.outputs calls it"
        )

    @property
    def leaves_out(self) -> NoReturn:
        """No names of one client."""
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
        """The parameters that are trained, as they are now."""
        return dict(self._own["parameters"])

    @property
    def inputs(self) -> Any:
        """The inputs of the present batch."""
        return self._batch()[0]

    @property
    def targets(self) -> Any:
        """The targets of the present batch."""
        return self._batch()[1]

    def outputs(self, tensors: Mapping[str, torch.Tensor], inputs: Any = None) -> Any:
        """Return the outputs of the model with other tensors; see `algorithm.Client`."""
        inputs = self.inputs if inputs is None else inputs
        with torch.no_grad(), evaluating(self._common.model), sdpa_kernel(SDPBackend.MATH):
            return functional_call(self._common.model, self._filled(tensors), (inputs,))

    def gradient(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the gradient on the present batch at other parameters; see `algorithm.Client`."""
        filled, (inputs, targets) = self._filled(tensors), self._batch()

        def loss_of(leaves: Tensors) -> torch.Tensor:
            outputs = functional_call(self._common.model, filled | leaves, (inputs,))
            return one_loss(self._common.task.loss(outputs, targets))

        with sdpa_kernel(SDPBackend.MATH):
            return dict(grad(loss_of)({name: filled[name] for name in self._own["parameters"]}))

    def full_gradient(self, tensors: Mapping[str, torch.Tensor]) -> NoReturn:
        """Refuse the call: the clients have different numbers of examples."""
        raise CannotBatch("calls client.full_gradient, over data of which each client has another number of examples")

    def full_loss(self, tensors: Mapping[str, torch.Tensor]) -> NoReturn:
        """Refuse the call: it returns a number of Python, and each client has its own."""
        raise CannotBatch("calls client.full_loss, which is a number of Python, and each client has its own")

    def _filled(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the tensors of a forward pass, which changes none of these."""
        start, trained = self._common.start, self._own["parameters"]
        if unknown := sorted(tensors.keys() - start.keys()):
            raise TaskBroken(f"{', '.join(unknown)}: no tensor of the model (its tensors: {', '.join(start)})")
        every = start | self._own["buffers"] | trained | dict(tensors)
        return {name: t.detach() if name in trained else t.detach().clone() for name, t in every.items()}

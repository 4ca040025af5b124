"""The client's side of a custom federated algorithm: hooks of the built-in training loop.

    version --> begin --> [ loss --> gradients --> (optimizer's step) --> after_step ] K times --> end --> update

Importing this file does not import torch.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from atoll.task.context import Context
from atoll.task.local import Local

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

HOOKS = ("shared", "state", "begin", "loss", "gradients", "after_step", "end", "evaluated")
"""The methods of an algorithm."""


class Client(Protocol):
    """The client of one training, as the hooks of an `Algorithm` see it. Names are keys of the model's state_dict."""

    model: "torch.nn.Module"
    """The model that is trained or evaluated."""

    local: Local
    """The settings of the round."""

    context: Context
    """The context of the training: site, round, version, seed, deadline, options, settings."""

    start: "Tensors"
    """The tensors of the model before the training, by name: the version's, and the layers that stay at the site."""

    received: "Tensors"
    """The shared tensors of the version, by name."""

    shared: "Tensors"
    """The shared tensors that the client sends: `client.shared[name] = tensor` sets one."""

    state: "Tensors"
    """The client's state, which it keeps: `client.state[name] = tensor` sets one."""

    leaves_out: set[str]
    """The names of tensors that the update leaves out, for a run with `aggregation.partial`."""

    num_steps: int
    """The number of steps that are done."""

    @property
    def inputs(self) -> Any:
        """The inputs of the present batch."""
        ...

    @property
    def targets(self) -> Any:
        """The targets of the present batch."""
        ...

    @property
    def parameters(self) -> "Tensors":
        """The present values of the trained parameters, by name."""
        ...

    def outputs(self, tensors: "Mapping[str, torch.Tensor]", inputs: Any = None) -> Any:
        """Return the outputs of the model with other tensors, in evaluation mode and without a gradient.

        Args:
            tensors: parameters and buffers by name; others have their present values in the model.
            inputs: None: the inputs of the present batch.
        """
        ...

    def gradient(self, tensors: "Mapping[str, torch.Tensor]") -> "Tensors":
        """Return the gradient of the task's loss on the present batch at other parameters, by name.

        A parameter without a gradient has zeros.

        Args:
            tensors: parameters and buffers; others have their present values in the model. The forward pass may change
                these buffers in place, such as a running mean, unless they belong to `start`.
        """
        ...

    def full_gradient(self, tensors: "Mapping[str, torch.Tensor]") -> "Tensors":
        """Return the gradient of the task's loss over all training examples, as `gradient`; it changes no buffer."""
        ...

    def full_loss(self, tensors: "Mapping[str, torch.Tensor]") -> float:
        """Return the task's mean loss over all examples of the training data, in evaluation mode.

        Args:
            tensors: as in `outputs`.
        """
        ...


class Algorithm:
    """A federated algorithm at the client. A subclass overrides the hooks that it needs; the others change nothing.

        class Proximal(Algorithm):
            def gradients(self, client, gradients):
                return {name: g + 0.1 * (client.parameters[name] - client.start[name]) for name, g in gradients.items()}

        task = Task(..., algorithm=Proximal())

    Two kinds of tensors are kept beside the model, each under its names:

    - `shared` is sent with every version and comes back with every update. The coordinator sets it to the mean of the
      clients' returned tensors, with the weights of their updates.
    - `state` stays at the client, and is there again in its next training. It is the state of the last training whose
      update is part of a model: a refused update leaves no trace.

    The object itself keeps nothing between trainings: clients of a simulation share it, and a deployed one may restart.
    """

    needs_state: ClassVar[bool] = False
    """Whether the state is required: a client that has lost it cannot continue the run. False: it restarts from its
    first state."""

    def shared(self, model: "torch.nn.Module") -> "Mapping[str, torch.Tensor]":
        """Return the shared tensors of version 0, of floats.

        Args:
            model: the initial model.
        """
        return {}

    def state(self, model: "torch.nn.Module") -> "Mapping[str, torch.Tensor]":
        """Return a client's first state; its names, shapes and dtypes do not depend on values.

        Args:
            model: the model, with the version that the client trains from.
        """
        return {}

    def begin(self, client: Client) -> None:
        """Prepare a training, before its first step."""

    def loss(self, client: Client, loss: "torch.Tensor", outputs: Any) -> "torch.Tensor":
        """Return the loss whose gradient is taken.

        Args:
            client: the client, with the batch, `inputs` and `targets`.
            loss: the task's loss of the batch, which is reported in any case.
            outputs: the outputs of the model.
        """
        return loss

    def gradients(self, client: Client, gradients: "dict[str, torch.Tensor]") -> "Mapping[str, torch.Tensor]":
        """Return the gradients for the optimizer's step, before they are clipped.

        Args:
            client: the client, with the batch.
            gradients: the gradient of `loss` and the term of `local.prox_mu` by parameter; zeros if it has none.
        """
        return gradients

    def after_step(self, client: Client) -> None:
        """Change tensors after a step of the optimizer, which `client.num_steps` counts."""

    def end(self, client: Client) -> None:
        """Set the tensors that the client sends (`client.shared`) and keeps (`client.state`), after the last step."""

    def evaluated(self, client: Client) -> "Mapping[str, torch.Tensor]":
        """Return the tensors in which the evaluated model differs from the version: a personal model."""
        return {}


def algorithm_faults(algorithm: object, *, has_fit: bool) -> Iterator[str]:
    """Yield the faults of `Task.algorithm`."""
    if algorithm is None:
        return
    if not isinstance(algorithm, Algorithm):
        yield f"algorithm must be an Algorithm or None, got {algorithm!r}"
    elif has_fit:
        yield "algorithm has hooks of the built-in training loop, and the task has a `fit` in its place"

"""The local optimizer of one client after another: the steps of local training, with an optimizer built once.

SGD is written out, in the operations of torch.optim.SGD and hence with its bits; the others are torch's own, whose
state is cleared for each client.
"""

from collections.abc import Sequence

import torch

from atoll.parallel.local_training.training import make_optimizer
from atoll.parallel.task.local import Local


class Steps:
    """The steps of the optimizer; `begin` comes before each client.

    Args:
        local: the settings of the optimizer, its rate, the proximal term, the clipping.
        parameters: the parameters of the one model that all clients train.
    """

    def __init__(self, local: Local, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._local, self._parameters = local, list(parameters)
        self._plain = [p.detach() for p in parameters]
        self._optimizer = None if local.optimizer == "sgd" else make_optimizer(local, self._parameters)
        self._momenta: dict[int, torch.Tensor] = {}
        self._start: list[torch.Tensor] = []
        self._corrections: list[torch.Tensor | None] = []

    def begin(self, corrections: Sequence[torch.Tensor | None] = ()) -> None:
        """Begin a client: clear the optimizer's state, and take the present parameters as the start.

        Args:
            corrections: SCAFFOLD's c - c_i of each parameter, None for a parameter without one; empty: no SCAFFOLD.
        """
        self._momenta.clear()
        if self._local.has_own_optimizer:  # its state may be anywhere
            self._optimizer = make_optimizer(self._local, self._parameters)
        elif self._optimizer is not None:
            self._optimizer.state.clear()
        if self._local.prox_mu:
            self._start = [p.clone() for p in self._plain]
        self._corrections = list(corrections)

    def __call__(self) -> None:
        """Make one step with the parameters' gradients, and clear them."""
        if self._start or self._corrections or self._local.clip_norm is not None:
            self._adjust_gradients()
        if self._optimizer is not None:
            with torch.no_grad():
                self._optimizer.step()
        else:
            self._descend()
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _adjust_gradients(self) -> None:
        """Add the terms of FedProx and SCAFFOLD to the gradients, and clip them."""
        for parameter, start in zip(self._parameters, self._start, strict=False):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - start, alpha=self._local.prox_mu)
        for parameter, correction in zip(self._parameters, self._corrections, strict=False):
            if correction is not None:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.add_(correction)
        if self._local.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._local.clip_norm)

    def _descend(self) -> None:
        found = [(index, p.grad) for index, p in enumerate(self._parameters) if p.grad is not None]
        if not found:
            return
        gradients = [gradient for _, gradient in found]
        weights = self._plain if len(found) == len(self._plain) else [self._plain[index] for index, _ in found]
        if self._local.weight_decay:
            gradients = self._with_decay(gradients, weights)
        if self._local.momentum:
            gradients = [self._momentum(found[at][0], gradient) for at, gradient in enumerate(gradients)]
        torch._foreach_add_(weights, gradients, alpha=-self._local.lr)

    def _with_decay(self, gradients: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        decay = self._local.weight_decay
        if self._local.decay_vectors:
            return list(torch._foreach_add(gradients, weights, alpha=decay))
        return [g if w.ndim <= 1 else g.add(w, alpha=decay) for g, w in zip(gradients, weights, strict=True)]

    def _momentum(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        if index not in self._momenta:
            self._momenta[index] = gradient.clone()
        else:
            self._momenta[index].mul_(self._local.momentum).add_(gradient)
        return self._momenta[index]

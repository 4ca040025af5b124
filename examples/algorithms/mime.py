"""Mime-lite: the clients' steps use the momentum of the server, which stays the same during a round.

Legend: x the global and y the local model, m the momentum, ∇f_i the gradient over all of a client's data.

    client:  y <- y - η ((1 - β) g(y) + β m);    sends  (1 - β) ∇f_i(x) + β m
    server:  m <- mean of what the clients send;    x <- x + mean (y - x)

Source: Karimireddy et al., "Breaking the centralized barrier for cross-device federated learning", NeurIPS 2021,
Algorithm 1 (MimeLite) with momentum as the base algorithm.
"""

import torch
from digit_sites import task_of

from atoll import Algorithm


class MimeLite(Algorithm):
    """The client; the server's part is the mean of the shared tensors."""

    def shared(self, model):
        return {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

    def begin(self, client):
        for name, gradient in client.full_gradient(client.start).items():
            client.shared[name] = self._mixed(client, name, gradient)

    def gradients(self, client, gradients):
        return {name: self._mixed(client, name, gradient) for name, gradient in gradients.items()}

    def _mixed(self, client, name, gradient):
        beta = client.context.options["beta"]
        return (1 - beta) * gradient + beta * client.received[name]


task = task_of(algorithm=MimeLite(), options={"beta": 0.9})

"""FedCM: the direction of the last round is the momentum of each step at the clients.

Legend: x the global and y the local model, Δ the direction, K steps of rate η_l, α the weight of the fresh gradient.

    client:  y <- y - η_l (α g(y) + (1 - α) Δ),  K times;    sends  (x - y) / (η_l K)
    server:  Δ <- mean of what the clients send;             x <- x + mean (y - x)

Source: Xu et al., "FedCM: Federated Learning with Client-level Momentum", arXiv:2106.10874, Algorithm 2, with
η_g = η_l K.
"""

import torch
from digit_sites import task_of

from atoll import Algorithm


class ClientMomentum(Algorithm):
    """The client; the server's part is the mean of the shared tensors."""

    def shared(self, model):
        return {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

    def gradients(self, client, gradients):
        if client.context.version == 0:  # there is no direction yet
            return gradients
        alpha = client.context.options["alpha"]
        return {name: alpha * g + (1 - alpha) * client.received[name] for name, g in gradients.items()}

    def end(self, client):
        for name, now in client.parameters.items():
            client.shared[name] = (client.start[name] - now) / (client.local.lr * client.num_steps)


task = task_of(algorithm=ClientMomentum(), options={"alpha": 0.1})

"""FedDyn: the loss of each client gets a term that moves its optimum to that of the federation.

Legend: θ the global and θ_k the local model, h_k the client's and h the server's state, α the weight, m all clients.

    client:  gradient of  L_k(θ_k) - <h_k, θ_k> + α/2 |θ_k - θ|²,   then  h_k <- h_k - α (θ_k - θ)
    server:  h <- h - α/m sum_{k in P} (θ_k - θ);   θ <- mean_{k in P} θ_k - h / α

A client that is not in the round's cohort P keeps its h_k, so h counts with |P| / m.

Source: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1.
"""

import torch
from digit_sites import task_of

from atoll import Algorithm


class DynamicRegularization(Algorithm):
    """The client. A lost h_k would bias h for the rest of the run."""

    needs_state = True

    def state(self, model):
        return {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

    def gradients(self, client, gradients):
        alpha, now = client.context.options["alpha"], client.parameters
        return {
            name: g - client.state[name] + alpha * (now[name] - client.start[name]) for name, g in gradients.items()
        }

    def end(self, client):
        alpha = client.context.options["alpha"]
        for name, now in client.parameters.items():
            client.state[name] = client.state[name] - alpha * (now - client.start[name])


class FedDyn:
    """The server, with its state h."""

    slots = ("h",)

    def __init__(self, alpha: float, num_clients: int) -> None:
        self.alpha, self.num_clients = alpha, num_clients

    def init(self, slot):
        return 0.0

    def apply(self, master, mean, state, place):
        state["h"] -= self.alpha * place.num_updates / self.num_clients * mean
        return master + mean - state["h"] / self.alpha


task = task_of(algorithm=DynamicRegularization(), options={"alpha": 0.1})

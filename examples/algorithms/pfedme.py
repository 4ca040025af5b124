"""pFedMe: each client has a model of its own, the minimum of its loss and the distance to its local copy (Moreau).

Legend: w_k the local copy of the global model, θ_k the client's own model, λ the weight of their distance.

    client:  θ_k ≈ argmin L_k(θ) + λ/2 |θ - w_k|²,  by K gradient steps on the batch;    w_k <- w_k - η λ (w_k - θ_k)
    server:  w <- (1 - β) w + β mean w_k,  which is `optimizer.lr = β`

The clients evaluate θ_k. Source: Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
Algorithm 1.
"""

from digit_sites import task_of

from atoll import Algorithm, Local


class MoreauEnvelope(Algorithm):
    """The client, which solves its proximal problem at each step."""

    def state(self, model):
        return model.state_dict()

    def gradients(self, client, gradients):
        options, copy = client.context.options, client.parameters
        own = {name: parameter.clone() for name, parameter in copy.items()}
        for _ in range(options["inner_steps"]):
            for name, gradient in client.gradient(own).items():
                own[name] = own[name] - options["inner_lr"] * (gradient + options["weight"] * (own[name] - copy[name]))
        client.state |= own
        return {name: options["weight"] * (copy[name] - own[name]) for name in gradients}

    def evaluated(self, client):
        return client.state


task = task_of(
    local=Local(epochs=2, batch_size=32, lr=0.02),
    algorithm=MoreauEnvelope(),
    options={"weight": 15.0, "inner_steps": 5, "inner_lr": 0.05},
)

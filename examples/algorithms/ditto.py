"""Ditto: each client has a model of its own, which the global model keeps from going too far.

Legend: w the global model of the round, v_k the client's own model, λ the weight of their distance.

    client:  trains w as in FedAvg;  beside it  v_k <- v_k - η (∇L_k(v_k) + λ (v_k - w)),  on the same batches

The clients evaluate v_k. Source: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML
2021, Algorithm 1.
"""

from digit_sites import SITES, accuracy, load_site, make_model
from torch import nn

from atoll import Algorithm, Local, Task


class Personal(Algorithm):
    """The client; the server's part is FedAvg."""

    def state(self, model):
        return model.state_dict()

    def after_step(self, client):
        weight, lr = client.context.options["weight"], client.local.lr
        for name, gradient in client.gradient(client.state).items():
            own = client.state[name]
            client.state[name] = own - lr * (gradient + weight * (own - client.start[name]))

    def evaluated(self, client):
        return client.state


task = Task(
    model=make_model,
    data=load_site,
    loss=nn.functional.cross_entropy,
    sites=SITES,
    metrics={"accuracy": accuracy},
    local=Local(epochs=2, batch_size=32, lr=0.1),
    algorithm=Personal(),
    options={"weight": 0.5},
)

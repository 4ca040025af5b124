"""Ditto: each client has a model of its own, which the global model keeps from going too far.

Legend: w the global model of the round, v_k the client's own model, λ the weight of their distance.

    client:  trains w as in FedAvg;  beside it  v_k <- v_k - η (∇L_k(v_k) + λ (v_k - w)),  on the same batches

The clients evaluate v_k. Source: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML
2021, Algorithm 1.
"""

from digit_sites import task_of

from atoll import Algorithm


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


task = task_of(algorithm=Personal(), options={"weight": 0.5})

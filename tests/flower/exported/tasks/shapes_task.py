"""Tasks of each kind, for an export: its code has neighbours, options, settings, a state and tensors of its own."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from atoll import Local, Metric, Task, Trained
from atoll.task.algorithm import Algorithm


def accuracy(outputs, targets):
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


def positives(outputs, targets):
    found = outputs.argmax(dim=1) == 1
    return (found & (targets == 1)).sum(), found.sum(), (targets == 1).sum()


def data(site, split, context):
    from shapes import examples

    return examples(site, split, context.settings["noise"] + context.options["shift"])


def model():
    from shapes import smooth

    return smooth()


def linear():
    from shapes import linear as made

    return made()


def test_data():
    from shapes import examples

    return examples("server", "test")


class Drift(Algorithm):
    """Follows the mean of the clients' last gradients, and counts its trainings."""

    def shared(self, model):
        return {"mean": torch.zeros(3)}

    def state(self, model):
        return {"trainings": torch.zeros(1)}

    def gradients(self, client, gradients):
        return {name: g + 0.01 * client.received["mean"].sum() for name, g in gradients.items()}

    def end(self, client):
        client.state["trainings"] = client.state["trainings"] + 1
        client.shared["mean"] = client.received["mean"] + 0.1 * client.state["trainings"]


plain = Task(
    model=model,
    data=data,
    loss=nn.functional.cross_entropy,
    sites=("west", "mid", "east"),
    metrics={"accuracy": accuracy, "f1": Metric(positives, lambda sums: 2 * sums[0] / (sums[1] + sums[2]))},
    local=Local(batch_size=8, lr=0.1, momentum=0.5),
    test_data=test_data,
    options={"shift": 0.0},
    settings={"noise": 0.0},
    site_settings={"mid": {"noise": 0.25}},
)
without_buffers = replace(plain, model=linear)
with_layers_at_home = replace(plain, local=Local(batch_size=8, lr=0.1, momentum=0.5, keep="batchnorm"))
with_a_kept_optimizer = replace(without_buffers, local=Local(batch_size=8, lr=0.1, momentum=0.9, keep_optimizer=True))
with_an_algorithm = replace(plain, algorithm=Drift())


class Arrays:
    """An ArrayTask with integers, a schedule of its own rate, options and settings."""

    sites = ("west", "mid", "east")
    options = MappingProxyType({"shift": 0.0})
    settings = MappingProxyType({"noise": 0.0})

    def initial(self, seed):
        return {"w": np.full((3, 2), seed, np.float32), "steps": np.zeros((), np.int64)}

    def train(self, parameters, instructions):
        context = instructions.context
        rate = instructions.local["rate"] + context.options["shift"] + context.settings["noise"]
        target = np.float32(len(instructions.site) + np.random.rand())
        update = {"w": np.float32(rate) * (target - parameters["w"]), "steps": np.asarray(2, np.int64)}
        return Trained(update, 5 + len(instructions.site), {"loss": (float(np.abs(parameters["w"]).sum()), 6.0)})

    def evaluate(self, parameters, *, split, site):
        return {"far": (float(np.abs(parameters["w"]).sum()), 1.0 if site is None else float(len(site)))}

    def num_examples(self, site):
        return 5 + len(site)


arrays = Arrays()

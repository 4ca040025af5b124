"""The small task with a loss that depends on the round, on an option and on a setting of the site."""

import torch

from atoll import Local, Task
from tests.simulations.federation import line_task

SITES = line_task.SITES


def loss(outputs, targets, context):
    smoothing = context.options["smoothing"] / context.round if context.round else 0.0
    return torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=smoothing)


def data(site, split, context):
    inputs, targets = line_task.data(site, split).tensors
    return torch.utils.data.TensorDataset(inputs * context.settings["scale"], targets)


def model(context):
    return torch.nn.Sequential(
        torch.nn.Linear(3, context.options["width"]), torch.nn.Linear(context.options["width"], 2)
    )


task = Task(
    model=model,
    data=data,
    loss=loss,
    sites=SITES,
    metrics={"accuracy": line_task.correct},
    local=Local(batch_size=4, lr=0.2),
    test_data=lambda: line_task.pooled("test"),
    options={"smoothing": 0.0, "width": 4},
    settings={"scale": 1.0},
)
by_site = Task(
    model=line_task.model,
    data=line_task.data,
    loss=lambda outputs, targets, context: loss(outputs, targets, context) * (1 + len(context.site or "")),
    sites=SITES,
    options={"smoothing": 0.0},
    test_data=lambda: line_task.pooled("test"),
)

"""The small task with other models: integer tensors, and tensors that do not travel."""

from dataclasses import replace

import torch

from tests.simulations.federation.line_task import task


def normed_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def adapted_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    model[0].requires_grad_(False)
    return model


normed = replace(task, model=normed_model)
adapted = replace(task, model=adapted_model, travels="trained")

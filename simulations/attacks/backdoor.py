"""The success of a backdoor: the share of triggered test examples that get the adversary's label.

Accuracy does not show a backdoor: on inputs without the trigger the model is as good as any. Examples that have the
target label already do not count.

Source: Bagdasaryan et al., "How To Backdoor Federated Learning", AISTATS 2020, Section 5.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import TensorDataset

from atoll.protocol.settings import ConfigError
from atoll.simulations.attacks.config import AttackConfig
from atoll.simulations.attacks.poison import Stamp, everything
from atoll.task.arrays import Arrays
from atoll.task.metrics import values
from atoll.task.randomness import server_data_of
from atoll.task.task import Task
from atoll.training.local.training import evaluate
from atoll.training.model.parameters import build_model, load_parameters

SUCCESS = "backdoor"
"""Name of the metric."""


def stamp(config: AttackConfig) -> Stamp:
    """Return the trigger that the settings describe."""
    value = 1.0 if config.trigger_value is None else config.trigger_value
    return Stamp(target=config.target or 0, size=config.trigger_size or 2, value=value)


def triggered(dataset: Any, trigger: Stamp) -> TensorDataset:
    """Return all examples of other labels than the target, with the trigger, and with the target as their label.

    Raises:
        ConfigError: no example has another label.
    """
    inputs, targets = everything(dataset)
    others = (targets != trigger.target) & (targets >= 0)
    if not others.any():
        raise ConfigError([f"attack.target: got {trigger.target}; the test data has no other label"])
    return TensorDataset(*trigger(inputs[others], targets[others]))


def triggered_task(task: Task, config: AttackConfig) -> Task | None:
    """Return a task whose only metric, `backdoor`, is the success on the server's triggered test data.

    None: the attack is not a backdoor, or the server has no test data.
    """
    if config.kind != "backdoor" or task.test_data is None:
        return None
    data = triggered(server_data_of(task), stamp(config))
    return replace(task, test_data=lambda: data, metrics={SUCCESS: hits})


def hits(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[int, int]:
    """Return (the number of examples classified as the target, the number of examples); classes are on axis 1."""
    return int((outputs.argmax(dim=1) == targets).sum()), targets.numel()


def success(task: Task, config: AttackConfig, version: Arrays) -> float | None:
    """Return the share in [0, 1] under a version of the global model; None as for `triggered_task`."""
    measured = triggered_task(task, config)
    if measured is None or measured.test_data is None:
        return None
    model = build_model(measured, 0)
    load_parameters(model, version)
    sums = evaluate(measured, model, measured.test_data())
    return values(measured.metrics, sums)[SUCCESS]

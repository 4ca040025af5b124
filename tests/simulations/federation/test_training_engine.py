import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.protocol.settings import ConfigError
from atoll.server.config.run import RunConfig
from atoll.simulations.engines.engine import Job, Training
from atoll.simulations.federation.config import SimulationConfig
from atoll.simulations.federation.training_engine import check_evaluations, engine_of, training_of
from atoll.training.model.parameters import initial_parameters


@pytest.mark.parametrize("threads", [1, 2])
def test_clients_train_with_as_many_threads_as_the_settings_say(threads: int) -> None:
    seen = list[int]()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return nn.functional.cross_entropy(outputs, targets)

    task = Task(
        model=lambda: nn.Linear(2, 3),
        data=lambda site, split: TensorDataset(torch.ones(4, 2), torch.arange(4) % 3),
        sites=["a", "b"],
        loss=loss,
        local=Local(batch_size=4),
    )
    simulation = SimulationConfig(engine="sequential", threads=threads)
    version = initial_parameters(task, 0)
    told = list[str]()
    engine = engine_of(
        simulation, Training(task=task), version, ["a", "b"], cohort=2, trainings=10**6, before="", tell=told.append
    )
    seen.clear()
    list(engine.train(version, [Job("a", 1)]))
    assert seen == [threads]


@pytest.mark.parametrize("engine", ["auto", "sequential", "processes", "batched"])
def test_a_cluster_that_no_engine_would_use_is_refused(engine: str) -> None:
    with pytest.raises(ValueError, match=f'ray_address belongs to engine "ray", and engine is "{engine}"'):
        SimulationConfig.model_validate({"engine": engine, "ray_address": "10.0.0.1:6379"})


class Carrying(nn.Module):
    """A model that counts its passes of evaluations, as an attribute or with a counter that nothing can give back."""

    def __init__(self, counter: Iterator[int] | None = None) -> None:
        super().__init__()
        self.linear, self.calls, self.counter = nn.Linear(2, 3), 0, counter

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.calls = self.calls + 1 if self.counter is None else next(self.counter)
        return self.linear(inputs) + self.calls


def test_a_number_that_an_evaluation_leaves_on_the_model_is_given_back() -> None:
    task = Task(
        model=Carrying,
        data=lambda site, split: TensorDataset(torch.ones(4, 2), torch.ones(4, 3)),
        sites=["a", "b"],
        loss=nn.functional.mse_loss,
    )
    check_evaluations(
        SimulationConfig(engine="sequential"), Training(task=task), initial_parameters(task, 0), ["a", "b"]
    )


def test_a_model_that_carries_state_from_evaluation_to_evaluation_is_refused() -> None:
    counter = itertools.count()
    task = Task(
        model=lambda: Carrying(counter),
        data=lambda site, split: TensorDataset(torch.ones(4, 2), torch.ones(4, 3)),
        sites=["a", "b"],
        loss=nn.functional.mse_loss,
    )
    simulation, version = SimulationConfig(engine="sequential"), initial_parameters(task, 0)
    said = r"two evaluations of client a differ in the sums of 'loss' by up to .*state that a forward pass leaves"
    with pytest.raises(ConfigError, match=said):
        check_evaluations(simulation, Training(task=task), version, ["a", "b"])


def test_gpus_that_are_not_there_are_refused() -> None:
    task = Task(model=lambda: nn.Linear(2, 3), data=lambda site, split: None, sites=["a"], loss=nn.functional.mse_loss)
    with pytest.raises(ConfigError, match=r'simulation\.devices: got \[1\], which are GPUs.*set "cuda"'):
        training_of(SimulationConfig(devices=[1]), task, RunConfig(name="r", task="t.py:task"))

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.parallel.local_training.parameters import initial_parameters
from atoll.simulations.engines.engine import Job, Training
from atoll.simulations.federation.config import SimulationConfig
from atoll.simulations.federation.training_engine import engine_of


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
    with pytest.raises(ValueError, match=f'ray_address is of engine "ray", and engine is "{engine}"'):
        SimulationConfig.model_validate({"engine": engine, "ray_address": "10.0.0.1:6379"})

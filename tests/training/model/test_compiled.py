"""A compiled model has the names that it has without a compiler, in versions, updates, checkpoints and exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.parallel.trainer.config import TrainConfig
from atoll.training.local.training import train_locally
from atoll.training.model.compiled import in_place
from atoll.training.model.parameters import build_model, initial_parameters, parameters_of
from tests.parallel.trainer.training import model as exported
from tests.parallel.trainer.training import run

INPUTS = torch.linspace(-1, 1, 96).reshape(16, 6)
ROWS = TensorDataset(INPUTS, torch.arange(16) % 3)
CALLS = list[int]()


def counting(graph: Any, _inputs: Any) -> Any:
    """Compile to what the model computes, and count."""
    CALLS.append(len(graph.graph.nodes))
    return graph.forward


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 3))


def whole() -> nn.Module:
    return torch.compile(plain(), backend=counting)  # type: ignore[return-value]


def inner() -> nn.Module:
    model = plain()
    model[1] = torch.compile(model[1], backend=counting)  # type: ignore[assignment]
    return model


def task_of(model: Any) -> Task:
    return Task(
        model=model,
        data=lambda site, split: ROWS,
        loss=nn.functional.cross_entropy,
        sites=["a"],
        local=Local(lr=0.1, batch_size=None, epochs=2),
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # read by torch's compiler
@pytest.mark.parametrize("make", [whole, inner])
def test_names_and_values_are_those_of_the_plain_model_in_a_federation_and_in_a_training(
    make: Any, tmp_path: Path
) -> None:
    initial, expected = initial_parameters(task_of(make), 0), initial_parameters(task_of(plain), 0)
    assert [*initial] == [*expected]
    CALLS.clear()
    trained = {}
    for name, task in (("plain", task_of(plain)), ("compiled", task_of(make))):
        model = build_model(task, 0)
        train_locally(task, model, ROWS, task.local, seed=0)
        trained[name] = parameters_of(model)
    assert CALLS, "it is compiled"
    assert [*trained["compiled"]] == [*trained["plain"]]
    for name, value in trained["plain"].items():
        torch.testing.assert_close(torch.from_numpy(trained["compiled"][name]), torch.from_numpy(value))
    run(tmp_path, task=task_of(make), config=TrainConfig(batch_size=16))
    assert {name: value.shape for name, value in exported(tmp_path).items()} == {
        name: value.shape for name, value in trained["plain"].items()
    }


def test_a_wrapper_with_hooks_of_its_own_stays() -> None:
    compiled: Any = whole()
    compiled.register_forward_hook(lambda _module, _inputs, outputs: outputs * 0)
    assert in_place(compiled) is compiled
    with torch.no_grad():
        assert float(in_place(compiled)(INPUTS).abs().sum()) == 0

"""A forward pass that changes the names or shapes of a model's tensors is refused by name; what passes, is not."""

import pytest
import torch
from torch import nn

from atoll.task.errors import TaskBroken
from atoll.training.model.passing_state import PassingState
from atoll.training.trials.same_form import SameForm


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(2, 3), nn.Linear(2, 3).requires_grad_(False)
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("cache", None, persistent=False)


def changed(kind: str, model: nn.Module) -> None:
    layer = model.get_submodule("layer")
    if kind == "values":
        nn.init.ones_(layer.weight)
        model.table = torch.ones(4)
    elif kind == "cache":
        model.cache = torch.zeros(9)
        layer.register_buffer("late", torch.zeros(2), persistent=False)
    elif kind == "parameter":
        layer.register_parameter("late", nn.Parameter(torch.zeros(2)))
    elif kind == "module":
        model.add_module("head", nn.Linear(3, 3))
    elif kind == "buffer":
        layer.register_buffer("late", torch.zeros(2))
    elif kind == "shape":
        model.table = torch.zeros(5)
    elif kind == "frozen":
        layer.requires_grad_(False)
    elif kind == "thawed":
        model.get_submodule("frozen").requires_grad_(True)
    elif kind == "removed":
        del model.table


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("values", None),
        ("cache", None),
        ("frozen", None),
        ("thawed", "frozen.bias and 1 more: requires_grad was set by the model's forward pass"),
        ("parameter", "layer.late: made by the model's forward pass"),
        ("module", "head.bias and 1 more: made by the model's forward pass"),
        ("buffer", "layer.late: registered by the model's forward pass"),
        ("shape", r"table: its shape was \(4,\) and is \(5,\) after a forward pass"),
        ("removed", "table: removed by the model's forward pass"),
    ],
)
def test_another_form_is_refused_by_the_name_of_its_tensor(kind: str, fault: str | None) -> None:
    model = Model()
    form = SameForm(model)
    form.see()
    changed(kind, model)
    if fault is None:
        form.see()
        return
    with pytest.raises(TaskBroken, match=fault):
        form.see()


def test_a_buffer_that_a_forward_pass_has_registered_does_not_reach_the_next_training() -> None:
    model = Model()
    passing = PassingState(model)
    changed("cache", model)
    passing.restore()
    assert model.cache is None
    assert not hasattr(model.get_submodule("layer"), "late")
    changed("cache", model)  # it can be registered again

"""Parameters that a forward pass changes are found by name, whichever way it changes them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.trials.watched import Written, written_in_forward
from tests.parallel.engine import reference
from tests.parallel.engine.cases import mine, plan
from tests.parallel.engine.test_step import engine_of
from tests.parallel.ranks import call_on_ranks

Change = Callable[[nn.Module, torch.Tensor], None]


class Changing(nn.Module):
    """A layer whose forward pass applies a change to it first; a batch norm, whose buffers may change."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.change = nn.Linear(64, 10), nn.BatchNorm1d(10), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 1, 8, 8) to (B, 10)."""
        self.change(self.layer, x)
        found: torch.Tensor = self.norm(self.layer(x.flatten(1)))
        return found


def nothing(_layer: nn.Module, _x: torch.Tensor) -> None:
    pass


def clamp(layer: nn.Module, _x: torch.Tensor) -> None:
    with torch.no_grad():
        layer.get_parameter("weight").clamp_(-1e3, 1e3)  # changes no value yet


def clamp_data(layer: nn.Module, _x: torch.Tensor) -> None:
    layer.get_parameter("weight").data.clamp_(-1, 1)


def one_row(layer: nn.Module, _x: torch.Tensor) -> None:
    with torch.no_grad():
        layer.get_parameter("weight")[3:4].mul_(0.5)


def replace(layer: nn.Module, _x: torch.Tensor) -> None:
    weight = layer.get_parameter("weight")
    weight.data = weight.data * 0.9


def together(layer: nn.Module, _x: torch.Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([layer.get_parameter("weight")], 0.9)


STATISTICS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def follow(layer: nn.Module, x: torch.Tensor) -> None:
    """A moving average of the examples that a rank sees."""
    with torch.no_grad():
        layer.get_parameter("weight").lerp_(x.flatten(1).mean(0).expand(10, 64), 0.1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("change", [clamp, clamp_data, one_row, replace, together, follow])
def test_a_changed_parameter_is_found(change: Change, device: str) -> None:
    with torch.device(device):
        model, x = Changing(change), torch.ones(4, 1, 8, 8)
        assert written_in_forward(model, lambda: model(x)) == Written(["layer.weight"], STATISTICS)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buffers_that_a_pass_changes_are_told_from_parameters(device: str) -> None:
    with torch.device(device):
        model, x = Changing(nothing), torch.ones(4, 1, 8, 8)
        assert written_in_forward(model, lambda: model(x)) == Written([], STATISTICS)


class Packed(nn.Module):
    """A layer whose state_dict has its scale as a new tensor, under another name; a table that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_state_dict_post_hook(self.pack)

    @staticmethod
    def pack(_module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _metadata: object) -> None:
        state[f"{prefix}packed"] = state.pop(f"{prefix}scale").half()
        state[f"{prefix}layer.weight"] = state[f"{prefix}layer.weight"].clone()

    def forward(self, x: torch.Tensor, is_counting: bool = False) -> torch.Tensor:
        """Map (B, 4) to (B, 2)."""
        self.table.add_(1)
        if is_counting:
            self.scale.mul_(1.0)
        found: torch.Tensor = self.layer(x) * self.scale
        return found


def test_a_state_dict_that_makes_new_tensors_is_no_change() -> None:
    model, x = Packed(), torch.ones(3, 4)
    assert written_in_forward(model, lambda: model(x)) == Written([], [])
    assert written_in_forward(model, lambda: model(x, is_counting=True)) == Written([], ["scale"])


def flushed(change: Change) -> dict[str, torch.Tensor]:
    engine = engine_of(Changing(change), plan(dp_replicate=2))
    engine.step(mine(*reference.image_batches()[0], engine.axes))
    engine.flush()
    return {name: value.detach().clone() for name, value in engine.parameters.items()}


@pytest.mark.real
def test_under_ddp_a_change_by_a_ranks_own_examples_is_named_before_a_checkpoint() -> None:
    with pytest.raises(RankFailed, match=r"layer\.weight: the ranks' copies differ.*parametriz"):
        call_on_ranks(flushed, 2, follow)


@pytest.mark.real
def test_under_ddp_a_change_that_is_the_same_everywhere_trains() -> None:
    first, second = call_on_ranks(flushed, 2, clamp_data)
    for name, value in first.items():
        assert torch.equal(value, second[name])

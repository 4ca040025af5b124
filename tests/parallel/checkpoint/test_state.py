from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from atoll.parallel.checkpoint.checkpointer import Checkpointer, Restored
from atoll.parallel.checkpoint.errors import CheckpointFailed
from atoll.parallel.checkpoint.state import LocalState, first_names, local_state, state_to_save
from tests.parallel.checkpoint.runs import Tiny, build, like
from tests.parallel.ranks import call_on_ranks


def keys(model: nn.Module) -> set[str]:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return set(state_to_save(local_state([model], [optimizer], {}), {}))


def checkpointed() -> nn.Module:
    model = Tiny()
    model.up = checkpoint_wrapper(model.up)  # type: ignore[assignment]
    return model


def compiled_inside() -> nn.Module:
    model = Tiny()
    model.up = torch.compile(model.up, backend="eager")  # type: ignore[assignment]
    return model


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [checkpointed, compiled_inside, lambda: torch.compile(Tiny(), backend="eager")])
def test_wrappers_leave_no_trace_in_the_names(wrapped: Callable[[], nn.Module]) -> None:
    assert {"model/up.weight", "optimizer/up.weight/exp_avg", "values/up.weight"} <= keys(Tiny())
    assert keys(wrapped()) == keys(Tiny())


def test_the_first_of_several_names_is_the_one() -> None:
    assert first_names([["a", "b", "c"], ["d", "e"]]) == {"b": "a", "c": "a", "e": "d"}


class Odd(Optimizer):
    """Keeps a number, a scalar, a column, and from its third step on something of the parameter's shape."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: Any = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "pair": (1.0, 2.0), "word": "x", "nothing": None})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["norm"] = parameter.grad.norm()
                state["rows"] = parameter.grad.reshape(len(parameter), -1).sum(1, keepdim=True)
                if state["count"] == 3:
                    state["late"] = parameter.grad.clone()


def trained(model: nn.Module, num_steps: int) -> Odd:
    optimizer = Odd(model.parameters(), torch.tensor(0.5))
    for number in range(num_steps):
        for name, parameter in model.named_parameters():
            parameter.grad = None if name == "weight" else torch.full_like(parameter, number + 1)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("num_steps", [1, 3])
def test_whatever_an_optimizer_keeps_comes_back(tmp_path: Path, num_steps: int) -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    saved, loaded = trained(first, num_steps), trained(second, 0)
    loaded.param_groups[0]["lr"].fill_(0.0)
    loaded.param_groups[0]["pair"] = (0.0, 0.0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save([first], [saved], {}, num_steps)
        checkpointer.load([second], [loaded], tmp_path / f"step-{num_steps:08d}")
    expected, found = saved.state[first.bias], loaded.state[second.bias]
    assert found.keys() == expected.keys() == {"count", "norm", "rows", *(["late"] if num_steps == 3 else [])}
    for key, value in expected.items():
        assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), key
    assert type(found["count"]) is int
    assert first.weight not in saved.state
    assert second.weight not in loaded.state
    group = loaded.param_groups[0]
    assert (group["lr"].item(), group["pair"], group["word"], group["nothing"]) == (0.5, (1.0, 2.0), "x", None)


def test_what_an_optimizer_keeps_and_json_has_not_is_named(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = trained(model, 1)
    optimizer.state[model.bias]["count"] = {1, 2}
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointFailed, match=r"the state of Odd for bias: .*set is not JSON serializable"):
            checkpointer.save([model], [optimizer], {}, 1)


def test_an_optimizer_for_each_part_is_needed() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="one optimizer for each part: got 2 for 1"):
        local_state([model], [SGD(model.parameters())] * 2, {})


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (nn.Linear(1, 1, device="meta"), "weight is on the meta device"),
        (nn.Linear(1, 1), "optimizer 0 trains a parameter that is not in part 0"),
    ],
)
def test_what_cannot_be_saved_is_named(part: nn.Module, fault: str) -> None:
    local: LocalState = local_state([part], [SGD(nn.Linear(1, 1).parameters())], {})
    assert any(fault in found for found in local.faults)


# what others keep


def save_beside(folder: Path, slot: dict[str, Any]) -> None:
    """Save under FSDP, with a slot of each parameter and a tensor of each rank's own."""
    parts, optimizers = build("fsdp")
    slots = {f"momentum/{name}": like(p, torch.from_numpy(slot[name])) for name, p in parts[0].named_parameters()}
    own = {"residual/up.weight": torch.full((2 + dist.get_rank(),), float(dist.get_rank()))}
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(parts, optimizers, {}, 1, slots=slots, rank_local=own)


def load_beside(folder: Path, layout: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    parts, optimizers = build(layout)
    with Checkpointer(folder) as checkpointer:
        restored: Restored = checkpointer.load(parts, optimizers, folder / "step-00000001")
    assert all(isinstance(slot, DTensor) == (layout == "fsdp") for slot in restored.slots.values())
    slots = {
        name: (slot.full_tensor() if isinstance(slot, DTensor) else slot).tolist()
        for name, slot in restored.slots.items()
    }
    return slots, restored.is_same_mesh, {key: tensor.tolist() for key, tensor in restored.rank_local.items()}


@pytest.mark.real
def test_slots_go_where_the_parameters_go_and_what_is_a_rank_s_own_stays(tmp_path: Path) -> None:
    slot = {name: torch.randn(p.shape).round(decimals=3) for name, p in Tiny().named_parameters()}
    call_on_ranks(save_beside, 2, tmp_path, {name: value.numpy() for name, value in slot.items()})
    expected = {f"momentum/{name}": value.tolist() for name, value in slot.items()}
    for rank, found in enumerate(call_on_ranks(load_beside, 2, tmp_path, "fsdp")):
        assert found == (expected, True, {"residual/up.weight": [float(rank)] * (2 + rank)})
    assert load_beside(tmp_path, "plain") == (expected, False, {})


def replicas(folder: Path, loads: bool) -> float:
    """Two copies of a model whose optimizers have seen different gradients."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.0, momentum=0.9)
    replica = dist.get_rank() % 2
    with Checkpointer(folder, replica=replica) as checkpointer:
        if loads:
            checkpointer.load([model], [optimizer], folder / "step-00000001")
        else:
            model.weight.grad = torch.full_like(model.weight, 3.0 + dist.get_rank())
            optimizer.step()
            checkpointer.save([model], [optimizer], {}, 1)
    return float(optimizer.state[model.weight]["momentum_buffer"])


@pytest.mark.real
def test_copies_that_train_alone_keep_their_own_momentum(tmp_path: Path) -> None:
    assert call_on_ranks(replicas, 2, tmp_path, False) == [3.0, 4.0]
    assert call_on_ranks(replicas, 2, tmp_path, True) == [3.0, 4.0]
    assert call_on_ranks(replicas, 1, tmp_path, True) == [3.0]

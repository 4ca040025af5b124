import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import parametrizations, prune

from atoll.training.model.as_built import AsBuilt

CALLS = {"count": 0}


def counting() -> Callable[[], None]:
    number = [0]

    def count() -> None:
        number[0] += 1

    return count


class Holder:
    of_class = 0

    def __init__(self) -> None:
        self.number, self.names, self.nested = 0, {"a": [1]}, [np.zeros(2)]
        self.tensor, self.layer = torch.zeros(2), nn.Linear(1, 1)
        self.generators = [torch.Generator(), random.Random(0), np.random.default_rng(0), np.random.RandomState(0)]
        self.counting = counting()

    def count_calls(self) -> None:
        CALLS["count"] += 1


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda held: setattr(held, "number", 1), "number"),
    (lambda held: setattr(held, "new", 1), "new"),
    (lambda held: setattr(Holder, "of_class", Holder.of_class + 1), "Holder.of_class"),
    (lambda held: held.names["a"].append(2), "names['a']"),
    (lambda held: held.nested[0].fill(1), "nested[0]"),
    (lambda held: held.tensor.add_(1), "tensor"),
    (lambda held: held.layer.weight.data.add_(1), "layer.weight"),
    (lambda held: torch.rand(1, generator=held.generators[0]), "generators[0]"),
    (lambda held: held.generators[1].random(), "generators[1]"),
    (lambda held: held.generators[2].random(), "generators[2]"),
    (lambda held: held.generators[3].random(), "generators[3]"),
    (lambda held: held.counting(), "nonlocal number[0]"),
    (lambda held: held.count_calls(), "global CALLS['count']"),
]


@pytest.mark.parametrize(("change", "path"), CHANGES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_change_has_its_path_and_is_given_back(change: Callable[[Any], Any], path: str) -> None:
    held = Holder()
    built = AsBuilt({"": held})
    assert built.differences() == []
    with torch.no_grad():
        change(held)
    assert built.differences() == [path]
    assert built.restore() == ([path], [])
    assert built.differences() == []


def _prune(model: nn.Module) -> None:
    prune.random_unstructured(model.get_submodule("0"), "weight", amount=1)


LEFT: dict[str, Callable[[nn.Sequential], Any]] = {
    "forward hook": lambda model: model[0].register_forward_hook(lambda *_: torch.full((2, 1), 7.0)),
    "pre-hook": lambda model: model[1].register_forward_pre_hook(lambda *_: (torch.zeros(2, 3),)),
    "hook of a parameter": lambda model: model[0].weight.register_hook(lambda gradient: 0 * gradient),
    "hook after the gradient": lambda model: model[0].weight.register_post_accumulate_grad_hook(
        lambda p: p.grad.zero_()
    ),
    "frozen": lambda model: model.requires_grad_(requires_grad=False),
    "another layer": lambda model: setattr(model, "1", nn.Linear(3, 1)),
    "one more layer": lambda model: model.append(nn.Dropout(0.9)),
    "forward of its own": lambda model: setattr(model, "forward", lambda x: x.sum() * model[0].weight.sum()),
    "parametrization": lambda model: parametrizations.weight_norm(model.get_submodule("0")),
    "pruned": _prune,
    "a parameter replaced": lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(3, 2))),
    "a constant": lambda model: setattr(model[2], "p", 0.9),
    "a buffer": lambda model: model.register_buffer("sums", torch.zeros(1)),
    "a gradient": lambda model: model(torch.ones(2, 2)).sum().backward(),
}


def _step(model: nn.Module) -> list[float]:
    """Return the output and the gradients of a batch, as one row of numbers."""
    torch.manual_seed(1)
    model.train()
    output = model(torch.ones(2, 2))
    output.sum().backward()
    return [*output.flatten().tolist(), *(v for p in model.parameters() for v in p.grad.flatten().tolist())]


@pytest.mark.parametrize("left", LEFT)
def test_a_model_computes_as_it_was_built(left: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Dropout(0.5))
    first, values = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    built = AsBuilt({"": model}, model.state_dict(keep_vars=True).values())
    LEFT[left](model)
    assert built.restore().kept == []
    model.load_state_dict(values)  # as each job does
    assert _step(model) == _step(first)
    assert list(model.state_dict()) == list(values)


class Lazy(OrderedDict[str, int]):
    """A table whose readers compute what they return, as a library's does that imports each entry."""

    def __bool__(self) -> bool:
        raise ValueError

    __len__ = __iter__ = keys = values = items = __bool__  # type: ignore[assignment]


def test_a_dictionary_with_its_own_readers_is_watched_as_it_is_stored() -> None:
    model = nn.Linear(2, 3)
    model.table, model._table = Lazy(), Lazy()
    OrderedDict.__setitem__(model.table, "a", 1)
    built = AsBuilt({"": model}, model.state_dict(keep_vars=True).values())
    assert built.differences() == []
    OrderedDict.__setitem__(model.table, "a", 2)
    OrderedDict.__setitem__(model._table, "b", 2)
    assert sorted(built.restore().changed) == ["_table['b']", "table['a']"]
    assert list(OrderedDict.items(model.table)) == [("a", 1)]
    assert list(OrderedDict.items(model._table)) == []


def test_what_cannot_be_given_back_is_said() -> None:
    model = nn.Linear(2, 3)
    built = AsBuilt({"": model}, model.state_dict(keep_vars=True).values())
    model.double()
    assert built.restore().kept == ["weight", "bias"]


def test_flags_of_the_process_and_hooks_of_all_modules_are_given_back() -> None:
    built = AsBuilt({}, with_process=True)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    try:
        changed = built.restore().changed
        now = torch.get_default_dtype(), torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        handle.remove()
    assert now == (torch.float32, True)
    assert [path for path in changed if path.startswith("torch")] == [
        "torch.set_default_dtype",
        "torch.set_grad_enabled",
    ]
    assert any("global_forward_hooks" in path for path in changed)


def test_a_sharded_tensor_is_compared_by_its_shard_without_the_other_ranks() -> None:
    """Another stage of a pipeline does not have it, and would wait for ever."""
    dist.init_process_group("fake", rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        layer = nn.Linear(2, 2)
        layer.seen = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)  # type: ignore[assignment]
        with CommDebugMode() as calls:  # type: ignore[no-untyped-call]
            before = AsBuilt({"model": layer})
            assert before.restore() == ([], [])
            layer.seen.to_local().add_(1)  # type: ignore[operator]
            assert before.restore().changed == ["model.seen"]
        assert layer.seen.to_local().tolist() == [2, 3]  # type: ignore[operator]
        assert calls.get_total_counts() == 0
    finally:
        dist.destroy_process_group()

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Task
from atoll.task.arrays import Arrays, layout_of
from atoll.task.errors import NotFinite, TaskBroken, TaskMismatch
from atoll.training.model.parameters import (
    buffers_of,
    initial_parameters,
    load_parameters,
    model_on_meta,
    parameters_of,
    update_of,
)
from tests.training.tasks import linear, make_task


class Buffers(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


class Extra(Buffers):
    def get_extra_state(self) -> str:
        return "more"


def test_update_is_local_minus_global_as_in_reddi_2021_algorithm_2() -> None:
    model = Buffers(w=torch.tensor([1.0, 2.0]), n=torch.tensor(3))
    before = parameters_of(model)
    model.get_buffer("w").add_(0.5)
    model.get_buffer("n").sub_(2)
    update = update_of(before, model)
    np.testing.assert_array_equal(update["w"], np.array([0.5, 0.5], np.float32))
    np.testing.assert_array_equal(update["n"], np.array(-2))
    assert (update["w"].dtype, update["n"].dtype, update["n"].shape) == (np.float32, np.int64, ())


def test_same_seed_gives_the_same_initial_bits() -> None:
    task = make_task()
    first, again, other = (initial_parameters(task, seed) for seed in (1, 1, 2))
    assert [a.tobytes() for a in first.values()] == [a.tobytes() for a in again.values()]
    assert first["0.weight"].tobytes() != other["0.weight"].tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_travels_as_float32_and_an_untrained_model_changes_nothing(dtype: torch.dtype) -> None:
    master = initial_parameters(make_task(), 0)
    model = linear().to(dtype)
    load_parameters(model, master)
    update = update_of(master, model)
    assert layout_of(update) == layout_of(master)
    assert all(not array.any() for array in update.values())
    with torch.no_grad():
        model.get_parameter("0.weight").add_(1.0)
    assert update_of(master, model)["0.weight"].mean() == pytest.approx(1.0, abs=0.01)


def test_tied_weights_travel_once_and_stay_tied() -> None:
    model = Tied()
    assert list(parameters_of(model)) == ["embed.weight"]
    load_parameters(model, {"embed.weight": np.full((5, 4), 2.0, np.float32)})
    assert model.head.weight.eq(2.0).all()
    assert list(update_of({"embed.weight": np.zeros((5, 4), np.float32)}, model)) == ["embed.weight"]


def test_a_strided_model_travels_in_c_order() -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = parameters_of(model)
    assert before["weight"].flags.c_contiguous
    load_parameters(model, {name: array + 1 for name, array in before.items()})
    update = update_of(before, model)
    assert update["weight"].flags.c_contiguous
    np.testing.assert_allclose(update["weight"], 1.0, rtol=1e-6)


def test_loading_lists_every_difference_and_changes_nothing() -> None:
    model = Buffers(a=torch.zeros(2), b=torch.zeros(2), c=torch.zeros(2))
    given: Arrays = {"a": np.ones(3, np.float32), "b": np.ones(2, np.int64), "d": np.ones(1, np.float32)}
    with pytest.raises(TaskMismatch) as caught:
        load_parameters(model, given)
    assert str(caught.value) == (
        "c is missing; d is unknown; a is F32 (3,), expected F32 (2,); b is I64 (2,), expected F32 (2,)"
    )
    assert all(not buffer.any() for buffer in model.buffers())


def test_read_only_arrays_load() -> None:
    array = np.ones(2, np.float32)
    array.flags.writeable = False
    model = Buffers(a=torch.zeros(2))
    load_parameters(model, {"a": array})
    assert update_of({"a": array}, model)["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_update_that_is_not_finite_is_refused_by_name(value: float) -> None:
    model = Buffers(good=torch.zeros(2), bad=torch.zeros(2))
    before = parameters_of(model)
    model.get_buffer("bad")[1] = value
    with pytest.raises(NotFinite, match="the update has NaN or infinite values in bad"):
        update_of(before, model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Buffers(z=torch.zeros(2, dtype=torch.complex64)),
            r"z is torch.complex64 \(allowed: float32, float16, .*model.float\(\).*persistent=False",
        ),
        (lambda: Buffers(z=torch.zeros(2, dtype=torch.float8_e4m3fn)), "z is torch.float8_e4m3fn"),
        (
            lambda: Buffers(z=torch.zeros(2, 2).to_sparse()),
            "z is torch.sparse_coo, and only dense tensors can be exchanged",
        ),
        (lambda: nn.LazyLinear(3), "weight has no shape yet: call the lazy module.*; bias has no shape yet"),
        (lambda: Extra(), "_extra_state is a str, and only tensors can be exchanged"),
        (lambda: 3, "must return a torch.nn.Module, got int"),
    ],
)
def test_what_cannot_travel_is_said_with_what_can(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(TaskBroken, match=message):
        initial_parameters(make_task(make), 0)


def test_an_initial_model_that_is_not_finite_is_refused() -> None:
    """Oracle: the largest float32 is (2 - 2**-23) 2**127, about 3.4e38."""
    for value in (float("nan"), -math.inf, 1e300, -3.5e38):
        buffer = torch.tensor([0.0, value], dtype=torch.float64)
        with pytest.raises(TaskBroken, match=r"^a starts with NaN, infinite values .* persistent=False"):
            initial_parameters(make_task(lambda buffer=buffer: Buffers(a=buffer)), 0)
    largest = (2 - 2**-23) * 2.0**127
    arrays = initial_parameters(make_task(lambda: Buffers(a=torch.tensor([largest], dtype=torch.float64))), 0)
    assert arrays["a"].tolist() == [largest]


@pytest.mark.parametrize(
    ("dtype", "start", "end", "travels_as"),
    [
        (torch.uint8, 5, 3, np.int16),
        (torch.uint8, 0, 255, np.uint8),
        (torch.uint8, 255, 0, np.int16),
        (torch.int8, 127, -128, np.int16),
        (torch.int16, -32768, 32767, np.int32),
        (torch.int32, 2**31 - 1, -(2**31), np.int64),
        (torch.int32, 7, 9, np.int32),
        (torch.bool, 1, 0, np.int16),
        (torch.bool, 0, 1, np.uint8),
    ],
)
def test_an_integer_difference_travels_in_a_dtype_that_holds_it(
    dtype: torch.dtype, start: int, end: int, travels_as: Any
) -> None:
    model = Buffers(level=torch.tensor([start]).to(dtype))
    before = parameters_of(model)
    model.get_buffer("level")[0] = end
    update = update_of(before, model)["level"]
    assert (update.dtype, update.tolist()) == (travels_as, [end - start])


def test_an_integer_difference_that_leaves_int64_is_refused() -> None:
    model = Buffers(level=torch.tensor([2**63 - 1]))
    with pytest.raises(ValueError, match="level: the difference local - global does not fit int64"):
        update_of({"level": np.array([-2])}, model)


def test_bool_and_float64_travel_and_come_back_in_their_own_dtype() -> None:
    model = Buffers(mask=torch.tensor([True, False]), scale=torch.tensor([0.5, 0.1], dtype=torch.float64))
    arrays = parameters_of(model)
    assert (arrays["mask"].dtype, arrays["mask"].tolist()) == (np.uint8, [1, 0])
    assert arrays["scale"].dtype == np.float32
    load_parameters(model, arrays)
    assert all(not array.any() for array in update_of(arrays, model).values()), "an untrained model changes nothing"
    model.get_buffer("scale").add_(1e-9)  # far below the digits of float32: the difference is kept
    assert update_of(arrays, model)["scale"].tolist() == pytest.approx([1e-9, 1e-9], rel=1e-6)
    assert (model.get_buffer("mask").dtype, model.get_buffer("scale").dtype) == (torch.bool, torch.float64)


def test_buffers_are_the_floats_that_no_optimizer_trains() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)  # frozen is no buffer: its update is zero
    assert buffers_of(model) == ["1.running_mean", "1.running_var"]
    assert set(parameters_of(model)) - set(buffers_of(model)) == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "1.num_batches_tracked",  # an integer, which follows the mean anyway
    }


def test_tied_weights_are_trained_under_the_name_that_travels() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert buffers_of(model) == []


@functools.lru_cache
def _table() -> torch.Tensor:
    return torch.ones(5)


_pretrained: dict[str, torch.Tensor] = {}
_shared: nn.Module | None = None


class Cached(nn.Module):
    """A model whose tables are made once for the process."""

    def __init__(self) -> None:
        global _shared
        super().__init__()
        self.layer = nn.Linear(5, 3)
        if not _pretrained:
            _pretrained.update({"weight": torch.zeros(3, 5), "bias": torch.ones(3)})
        self.layer.load_state_dict(_pretrained)
        if _shared is None:
            _shared = nn.Linear(3, 3)
        self.shared = _shared
        self.register_buffer("table", _table())


def test_a_model_on_meta_leaves_nothing_for_the_next_one() -> None:
    task = Task(model=lambda: Cached(), data=lambda site, split: None, loss=nn.functional.cross_entropy)
    assert all(parameter.is_meta for parameter in model_on_meta(task).parameters())
    model = task.model()
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert model.table.tolist() == [1.0] * 5
    assert task.model().shared is model.shared, "what is made for real stays"

"""What hooks hold between two steps: its form, and what has none."""

import json
import random
import types
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.parallel.mesh_client.hook_values import Form, NoForm, Reader, Writer

CPU = torch.device("cpu")


def read_again(value: Any, model: dict[str, torch.Tensor] | None = None) -> Any:
    """Return a value as it is read from its form, in JSON and tensors."""
    model = model or {}
    start = {name: tensor.detach().clone() for name, tensor in model.items()}
    writer = Writer(model, start)
    form = json.loads(json.dumps(writer.write(value, "client.it"), allow_nan=False))
    filled = [Form(**json.loads(json.dumps(asdict(form)))).empty(model, CPU) for form in writer.forms]
    for empty, tensor in zip(filled, writer.tensors, strict=True):
        with torch.no_grad():
            empty.copy_(tensor)
    return Reader(filled, model, start).read(form)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**80),
        0.1,
        float("inf"),
        "a\nb",
        [1, (2, [3.5, None]), {"x": {1: "one", (2, 3): False}}],
        {"b", "a"},
        frozenset({1, 2}),
        OrderedDict([("b", 1), ("a", 2)]),
        [(1, 2)] * 2,
    ],
)
def test_plain_values_are_the_same(value: Any) -> None:
    found = read_again(value)
    assert found == value
    assert type(found) is type(value)


def test_no_number_is_one_again() -> None:
    assert np.isnan(read_again({"x": [float("nan")]})["x"][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_tensors_are_the_same(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(6).sum() + torch.zeros(shape)).to(dtype)
    found = read_again([tensor, nn.Parameter(tensor.clone(), requires_grad=False)])
    for one in found:
        torch.testing.assert_close(one, tensor, rtol=0, atol=0, check_dtype=True)
    assert [isinstance(one, nn.Parameter) for one in found] == [False, True]


def test_one_tensor_under_two_names_stays_one() -> None:
    tensor = torch.ones(3)
    found = read_again({"a": tensor, "b": tensor, "c": tensor.clone()})
    found["a"].add_(1)
    assert (found["b"].tolist(), found["c"].tolist()) == ([2, 2, 2], [1, 1, 1])


def test_a_tensor_of_the_model_stays_the_model_s() -> None:
    """Whether as a parameter or as its values; one of the start is found there, too."""
    model = {"w": nn.Parameter(torch.ones(2)), "mean": torch.zeros(2)}
    parameter, values, buffer = read_again([model["w"], model["w"].detach(), model["mean"]], model)
    assert parameter is model["w"]
    with torch.no_grad():
        model["w"].fill_(5)
        model["mean"].fill_(6)
    assert (values.tolist(), buffer.tolist()) == ([5, 5], [6, 6])
    assert not values.requires_grad


def test_numbers_and_arrays_of_numpy_are_the_same() -> None:
    found = read_again([np.float32(0.1), np.arange(6).reshape(2, 3)[:, ::-1], np.array(2.5), np.int8(3)])
    assert [type(one) for one in found] == [np.float32, np.ndarray, np.ndarray, np.int8]
    assert found[0] == np.float32(0.1)
    np.testing.assert_array_equal(found[1], [[2, 1, 0], [5, 4, 3]])


@pytest.mark.parametrize("bits", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_generators_of_numpy_go_on(bits: str) -> None:
    generator = np.random.Generator(getattr(np.random, bits)(7))
    generator.random(3)
    again = read_again(generator)
    np.testing.assert_array_equal(again.normal(size=5), generator.normal(size=5))


def test_generators_of_torch_and_python_go_on() -> None:
    generator, dice = torch.Generator().manual_seed(3), random.Random(4)
    torch.rand(3, generator=generator), dice.gauss(0, 1)
    generator_again, dice_again = read_again([generator, dice])
    assert torch.equal(torch.randn(5, generator=generator_again), torch.randn(5, generator=generator))
    assert [dice_again.gauss(0, 1) for _ in range(3)] == [dice.gauss(0, 1) for _ in range(3)]


def views() -> list[torch.Tensor]:
    tensor = torch.ones(4)
    return [tensor, tensor[:2]]


def with_gradient() -> torch.Tensor:
    leaf = torch.ones(2, requires_grad=True)
    leaf.sum().backward()
    return leaf


SAME: list[int] = []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (types.SimpleNamespace(x=1), "client.it is a SimpleNamespace, which a checkpoint cannot hold"),
        ({"f": [len]}, "client.it['f'][0] is a builtin_function_or_method"),
        (nn.Linear(1, 1), "client.it is a Linear"),
        (views(), "client.it[1] shares its memory with another tensor, in another form"),
        (torch.ones(2, requires_grad=True) * 2, "client.it has a gradient"),
        (with_gradient(), "client.it has a gradient"),
        (torch.eye(2).to_sparse(), "client.it is a tensor of a kind"),
        ([SAME, SAME], "client.it[1] is the same object as another"),
        ({torch.ones(1)}, "client.it is a set of other things than numbers and strings"),
        (np.array([None]), "client.it has NumPy's dtype object"),
    ],
)
def test_what_has_no_form_is_named(value: Any, words: str) -> None:
    with pytest.raises(NoForm) as fault:
        read_again(value)
    assert words in str(fault.value)

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.simulations.engines.held import changed, marks_of

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
    (lambda held: held.layer.weight.data.add_(1) and held.layer.weight.detach().add_(1), "layer._parameters['weight']"),
    (lambda held: torch.rand(1, generator=held.generators[0]), "generators[0]"),
    (lambda held: held.generators[1].random(), "generators[1]"),
    (lambda held: held.generators[2].random(), "generators[2]"),
    (lambda held: held.generators[3].random(), "generators[3]"),
    (lambda held: held.counting(), "nonlocal number[0]"),
    (lambda held: held.count_calls(), "global CALLS['count']"),
]


@pytest.mark.parametrize(("change", "path"), CHANGES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_change_has_its_path(change: Callable[[Any], Any], path: str) -> None:
    held = Holder()
    before = marks_of(held)
    assert changed(before, marks_of(held)) is None
    with torch.no_grad():
        change(held)
    assert changed(before, marks_of(held)) == path

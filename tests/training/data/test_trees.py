from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import pytest
import torch

from atoll.training.data.trees import map_tensors, tensors

Pair = namedtuple("Pair", ["logits", "hidden"])


@dataclass
class Outputs:
    logits: Any
    hidden: Any = None


@dataclass(frozen=True)
class Frozen:
    logits: Any
    hidden: Any = None


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """The kind of `transformers.utils.ModelOutput`: a mapping whose keys are attributes; None is left out."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, key: str, value: Any) -> None:
        if key in self.keys() and value is not None:
            super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


ONE, TWO = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    "tree",
    [
        Pair(ONE, TWO),
        Outputs(ONE, TWO),
        Outputs(ONE),
        Frozen(ONE, TWO),
        ModelOutput(logits=ONE, hidden=TWO),
        ModelOutput(logits=ONE),
        ModelOutput(logits=ONE, hidden=(TWO, TWO)),
        [ONE, [TWO]],
        (ONE, "name", None),
        {"logits": ONE, "n": 3},
        OrderedDict(logits=ONE),
        defaultdict(lambda: TWO, {"logits": ONE}),
        UserDict({"logits": ONE}),
        torch.return_types.max((ONE, TWO)),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_a_tree_keeps_its_types_and_its_attributes(tree: Any) -> None:
    before = [tensor.clone() for tensor in tensors(tree)]
    mapped = map_tensors(lambda tensor: tensor + 2, tree)
    assert type(mapped) is type(tree)
    assert all(torch.equal(now, then + 2) for now, then in zip(tensors(mapped), before, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(tensors(tree), before, strict=True)), "itself unchanged"
    if hasattr(tree, "logits"):
        assert torch.equal(mapped.logits, tree.logits + 2)


def test_what_cannot_be_changed_becomes_a_dict_and_a_leaf_stays() -> None:
    assert list(map_tensors(torch.neg, MappingProxyType({"logits": ONE}))) == ["logits"]
    leaf = object()
    assert map_tensors(torch.neg, [leaf])[0] is leaf
    assert list(tensors(Outputs)) == [], "a class is no tree"


def test_the_outputs_of_a_transformers_model_keep_their_type() -> None:
    found = pytest.importorskip("transformers.modeling_outputs", reason="transformers is not installed")
    outputs = found.CausalLMOutput(logits=ONE, hidden_states=(TWO, TWO))
    mapped = map_tensors(lambda tensor: tensor + 2, outputs)
    assert type(mapped) is type(outputs)
    assert torch.equal(mapped.logits, ONE + 2)
    assert torch.equal(mapped["hidden_states"][1], TWO + 2)
    assert torch.equal(outputs.logits, torch.ones(2))

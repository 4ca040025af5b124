from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.parallel.engine.blueprint import balanced, blocks, cut, pieces, stage
from tests.parallel.engine.cases import OwnModule, cnn, decoder, mlp, own_sequential


def heaviest(costs: list[float], cuts: list[int]) -> float:
    bounds = [0, *cuts, len(costs)]
    return max(sum(costs[start:end]) for start, end in pairwise(bounds))


@given(st.data(), st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_no_other_cut_is_lighter(data: st.DataObject, costs: list[float]) -> None:
    """Oracle: every cut there is."""
    stages = data.draw(st.integers(1, len(costs)))
    cuts = balanced(costs, stages)
    assert len(cuts) == stages - 1
    assert all(start < end for start, end in pairwise([0, *cuts, len(costs)]))
    best = min(heaviest(costs, list(others)) for others in combinations(range(1, len(costs)), stages - 1))
    assert heaviest(costs, cuts) == pytest.approx(best)


def test_equal_layers_are_dealt_equally() -> None:
    stages = cut(decoder(8), 4)
    assert [sum(name.startswith("layers.") for name in names) for names in stages] == [2, 2, 2, 2]
    assert stages[0][0] == "embed"
    assert stages[-1][-2:] == ["norm", "head"]


@pytest.mark.parametrize("model", [decoder(4), decoder(4, tied=True), mlp(), cnn(), own_sequential()])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_one_after_another_are_the_model(model: nn.Module, num_stages: int) -> None:
    inputs = torch.randint(0, 64, (3, 16)) if "embed" in dict(model.named_children()) else torch.randn(3, 1, 8, 8)
    found = [stage(model, names) for names in cut(model, num_stages)]
    outputs = inputs
    for part in found:
        outputs = part(outputs)
    assert torch.equal(outputs, model(inputs))
    names = [name for part in found for name, _ in part.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


def test_a_stage_does_not_share_memory_with_the_model() -> None:
    model = mlp()
    part = stage(model, pieces(model)[:1])
    with torch.no_grad():
        next(part.parameters()).zero_()
    assert next(model.parameters()).abs().sum() > 0


def test_blocks_are_found_where_a_model_says_nothing() -> None:
    assert blocks(OwnModule()) == ["middle.0", "middle.1", "middle.2"]
    assert blocks(own_sequential()) == ["1", "3", "5"]
    assert blocks(decoder(2)) == ["layers.0", "layers.1"]
    assert blocks(nn.Linear(2, 2)) == []


def test_every_stage_of_a_row_of_layers_has_parameters_or_the_cut_is_refused() -> None:
    """Activations and poolings are light; a stage of nothing else could not be trained."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(3, 3), nn.ReLU(), nn.Identity())))
    for num_stages in (2, 3, 4):
        for names in cut(model, num_stages):
            assert any(int(name) % 3 == 0 for name in names), names
    with pytest.raises(ValueError, match="4 layers with parameters cannot fill 5 stages"):
        cut(model, 5)

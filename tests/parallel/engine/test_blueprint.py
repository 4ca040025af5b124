from collections import OrderedDict
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from atoll.parallel.engine.assemble import check_model
from atoll.parallel.engine.batchnorm import SharedBatchNorm, convert
from atoll.parallel.engine.blueprint import Blueprint, balanced, blocks, cut, pieces, stage
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from tests.parallel.engine.cases import OwnModule, cnn, decoder, mlp, own_sequential, repeating


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


@pytest.mark.parametrize("model", [decoder(4), decoder(4, tied=True), mlp(), cnn(), own_sequential(), repeating()])
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


def test_a_stage_has_the_layers_of_the_model_but_a_copy_of_a_weight_that_another_stage_of_its_rank_has() -> None:
    model = tied_blocks_in_a_row()
    model[0].weight.rate = 0.5  # type: ignore[union-attr, assignment]
    first = stage(model, ["0"])
    assert first[0] is model[0]  # type: ignore[index]
    second = stage(model, ["1", "2"], set(first.parameters()))
    copied = second[2].weight  # type: ignore[index]
    assert copied is not model[2].weight
    assert torch.equal(copied, model[2].weight)
    assert copied.rate == 0.5
    assert not isinstance(model[0], nn.Identity), "the model stays"


def tied_blocks_in_a_row() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


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
    with pytest.raises(ValueError, match="cannot fill 5 stages"):
        cut(model, 5)


def test_a_stage_without_anything_to_train_is_not_made() -> None:
    """Its optimizer would have no parameters, and the activations before it no gradient."""
    model = own_sequential()
    assert cut(model, 3) == [["0", "1", "2"], ["3", "4"], ["5"]]
    model[1].requires_grad_(False)
    assert cut(model, 2) == [["0", "1", "2", "3", "4"], ["5"]]
    with pytest.raises(ValueError, match=r"2 layers \(3, 5\) cannot fill 3 stages"):
        cut(model, 3)


class Positions(nn.Module):
    """Adds positions in `forward`, which every stage would do again."""

    blueprint = Blueprint(chain=("enter", "leave"))

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 4)
        self.positions = nn.Parameter(torch.randn(4))


def test_what_lies_outside_the_chain_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="positions belong to no module of the chain"):
        cut(Positions(), 2)


def test_a_name_that_is_called_twice_cannot_be_cut() -> None:
    model = OwnModule()
    model.blueprint = Blueprint(chain=("enter", "middle", "enter", "leave"))  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the chain has enter more than once"):
        cut(model, 2)


def test_blocks_are_what_is_called_and_each_is_there_once() -> None:
    pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
    assert blocks(nn.ModuleDict({"pairs": pairs})) == ["pairs.0.0", "pairs.0.1", "pairs.1.0", "pairs.1.1"]
    assert blocks(repeating()) == ["1", "3", "4", "8"]


def test_a_batch_norm_is_converted_under_each_of_its_names() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(OrderedDict(first=norm, middle=nn.Linear(4, 4), last=norm))
    convert(model, "ghost:2", None)
    assert isinstance(model.first, SharedBatchNorm)
    assert model.first is model.last


class Residual(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + super().forward(inputs)
        return outputs


def pair() -> list[nn.Module]:
    return [nn.Linear(8, 8), nn.Linear(8, 8)]


def test_a_sequential_with_a_forward_of_its_own_is_one_piece() -> None:
    model = nn.Sequential(Residual(*pair()), nn.Sequential(*pair()), Residual(*pair()))
    assert pieces(model) == ["0", "1.0", "1.1", "2"]
    inputs = torch.randn(3, 8)
    hidden = inputs
    for names in cut(model, 3):
        hidden = stage(model, names)(hidden)
    assert torch.equal(hidden, model(inputs))
    with pytest.raises(ValueError, match="Residual has a forward or hooks of its own and"):
        cut(Residual(*pair()), 2)


def test_hooks_of_a_container_keep_it_whole_and_those_of_the_model_refuse_the_cut() -> None:
    model = nn.Sequential(nn.Sequential(*pair()), nn.Linear(8, 8))
    model[0].register_forward_hook(lambda _module, _inputs, outputs: outputs * 2)
    assert pieces(model) == ["0", "1"]
    declared = OwnModule()
    declared.register_forward_pre_hook(lambda _module, inputs: inputs)
    declared.blueprint = Blueprint(chain=("middle",))  # type: ignore[assignment]
    with pytest.raises(ValueError, match="OwnModule has forward hooks, which each stage would call"):
        cut(declared, 2)


class Styled(nn.Module):
    """A layer that tp shards, and one beside it."""

    def __init__(self, beside: nn.Module) -> None:
        super().__init__()
        self.wide, self.beside = nn.Linear(8, 8), beside

    @property
    def blueprint(self) -> Blueprint:
        return Blueprint(tensor=lambda _sequence, _loss: {"wide": ColwiseParallel()})


def test_a_layer_with_a_parametrization_and_a_recurrent_one_are_refused_under_tp() -> None:
    plan = Plan(mesh=Mesh(tp=2))
    check_model(Styled(nn.LSTMCell(8, 8)), plan)
    with pytest.raises(ValueError, match=r"tp=2: beside cannot be replicated: .*; use tp=1"):
        check_model(Styled(nn.GRU(8, 8)), plan)
    model = Styled(nn.Identity())
    nn.utils.parametrizations.weight_norm(model.wide)
    with pytest.raises(ValueError, match=r"tp=2: wide\.parametrizations\.weight\.original0, .* cannot be sharded"):
        check_model(model, plan)

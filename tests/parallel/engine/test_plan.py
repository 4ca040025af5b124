from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from atoll.parallel.engine.assemble import assemble, check_model
from atoll.parallel.engine.blueprint import Blueprint
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from tests.parallel.engine import reference
from tests.parallel.engine.cases import OwnModule, decoder, mlp, repeating


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"zero": 4}, "plan.zero: .* got 4"),
        ({"accumulate": 0}, "plan.accumulate: must be at least 1, got 0"),
        ({"schedule": "2f2b"}, "plan.schedule: must be one of gpipe, .* got '2f2b'"),
        ({"precision": "fp8"}, "plan.precision: .* got 'fp8'"),
        ({"recompute": "some"}, "plan.recompute"),
        ({"batchnorm": "ghost:1"}, "plan.batchnorm"),
        ({"batchnorm": "ghost:4", "accumulate": 2}, "the virtual batches of ghost:4 are those of a whole batch"),
        ({"compression": "zip"}, "compression: must be one of .* got 'zip'"),
        ({"compression": "powersgd"}, "powersgd needs its rank"),
        ({"outer": "diloco"}, "diloco needs its number of steps"),
        ({"mesh": Mesh(dp_shard=2), "zero": 0}, "dp_shard=2"),
        ({"mesh": Mesh(dp_shard=2), "compression": "int8"}, "int8 is a hook of DDP"),
        ({"num_microbatches": 4}, "belongs to a pipeline"),
        ({"mesh": Mesh(pp=2), "accumulate": 2}, "a pipeline has num_microbatches"),
        ({"mesh": Mesh(pp=2), "stages_per_rank": 2}, "1f1b has 1, got 2"),
        ({"mesh": Mesh(pp=2), "num_microbatches": 1}, "1f1b needs at least 2, its stages, got 1"),
        ({"mesh": Mesh(pp=2), "schedule": "zbv-zero-bubble", "stages_per_rank": 3}, "exactly 2, got 3"),
        ({"mesh": Mesh(pp=4), "schedule": "interleaved-1f1b", "num_microbatches": 10}, "multiple"),
        ({"mesh": Mesh(pp=2), "schedule": "dualpipe-v", "num_microbatches": 3}, "at least 4, its stages, got 3"),
        ({"mesh": Mesh(pp=2, dp_shard=2), "schedule": "zbv-zero-bubble", "zero": 3}, "1 or 2, got 3"),
        ({"mesh": Mesh(pp=2), "schedule": "dualpipe-v", "recompute": "full"}, "must be none, got full"),
        ({"loss_parallel": True}, "needs tp > 1"),
        ({"offload": True, "zero": 0}, "plan.offload"),
        ({"mesh": Mesh(dp_replicate=2), "reduce_dtype": "bf16"}, "under DDP it is compression=bf16"),
        (
            {"mesh": Mesh(pp=2), "schedule": "zbv-zero-bubble", "recompute": "selective"},
            "plan.recompute: zbv-zero-bubble .* must be none, got selective",
        ),
        ({"outer": "local_sgd:4"}, "dp_replicate must be more than 1"),
    ],
)
def test_what_cannot_be_is_named_with_what_can(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Plan(**settings)


def test_all_faults_come_at_once() -> None:
    with pytest.raises(ValueError, match=r"plan.zero.*plan.accumulate.*plan.precision"):
        Plan(zero=9, accumulate=-1, precision="fp4")


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({}, 0),
        ({"mesh": Mesh(dp_replicate=4)}, 0),
        ({"mesh": Mesh(dp_shard=4)}, 3),
        ({"mesh": Mesh(dp_shard=4, pp=2)}, 2),
        ({"mesh": Mesh(dp_shard=4), "zero": 1}, 1),
    ],
)
def test_zero_is_chosen_by_the_mesh_unless_it_is_given(settings: dict[str, Any], stage: int) -> None:
    assert Plan(**settings).zero_stage == stage


def test_one_wrapper_at_most() -> None:
    assert Plan(mesh=Mesh(dp_replicate=2)).is_ddp
    assert not Plan(mesh=Mesh(dp_replicate=2)).is_sharded
    for sharded in (Plan(mesh=Mesh(dp_replicate=2, tp=2)), Plan(mesh=Mesh(dp_shard=2)), Plan(zero=3)):
        assert sharded.is_sharded
        assert not sharded.is_ddp
    assert not Plan().is_sharded
    assert not Plan(mesh=Mesh(dp_replicate=2), outer="local_sgd:2").is_ddp  # nothing is added up in each step


def misnamed() -> nn.Module:
    model = OwnModule()
    model.blueprint = Blueprint(tensor=lambda _sequence, _loss: {"layer.0": ColwiseParallel()})  # type: ignore[assignment]
    return model


def twice_in_a_stage() -> nn.Module:
    """A layer that is called twice, so light that both calls come to lie on one stage."""
    model = repeating()
    weights = {"3": 0.1, "4": 0.1, "5": 0.1, "6": 1.2}
    model.blueprint = Blueprint(chain=[name for name in model._modules], weights=weights)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("model", "plan", "named"),
    [
        (decoder(2, heads=4), Plan(mesh=Mesh(tp=8)), "tp=8 must divide heads=4; tp=8 must divide kv_heads=4"),
        (decoder(2), Plan(mesh=Mesh(pp=8)), "5 layers .* cannot fill 8 stages"),
        (OwnModule(), Plan(mesh=Mesh(tp=2)), "OwnModule declares no blueprint.tensor"),
        (OwnModule(), Plan(mesh=Mesh(pp=2)), "OwnModule is no nn.Sequential and declares no blueprint.chain"),
        (
            mlp(),
            Plan(mesh=Mesh(pp=2, dp_shard=2)),
            "global batch of 7 is too small for dp=2 with 4 micro-batches",
        ),
        (nn.Flatten(), Plan(), "Flatten has no parameter to train"),
        (misnamed(), Plan(mesh=Mesh(tp=2)), "blueprint.tensor: no module is called layer.0"),
        (
            twice_in_a_stage(),
            Plan(mesh=Mesh(pp=2), schedule="zbv-zero-bubble"),
            "3.weight and 5.weight are one weight, so schedule must be none of",
        ),
        (mlp(), Plan(accumulate=8), "global batch of 7 is too small for dp=1 with 8 micro-batches each"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_before_any_rank_waits(model: nn.Module, plan: Plan, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_model(model, plan, batch_size=7)


def test_the_largest_norm_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"clip_norm must be above 0, got -1.0"):
        Optimization(loss=nn.functional.cross_entropy, make_optimizer=sgd, clip_norm=-1.0)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """An optimizer of the model before it was cut, for example, would train nothing."""
    other = [("weight", nn.Parameter(torch.zeros(3, 2)))]
    optimization = Optimization(loss=nn.functional.cross_entropy, make_optimizer=lambda _named: sgd(other))
    with pytest.raises(ValueError, match=r"1 others are in its optimizer, the first of shape \(3, 2\)"):
        assemble(mlp(), Plan(), optimization)


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return reference.make_optimizer("sgd", named)


def test_a_mesh_needs_its_axes() -> None:
    with pytest.raises(ValueError, match="needs the axes"):
        assemble(
            mlp(),
            Plan(mesh=Mesh(dp_shard=2)),
            Optimization(loss=nn.functional.cross_entropy, make_optimizer=sgd),
        )

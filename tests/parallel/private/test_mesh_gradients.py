"""The clipped sum of example gradients on a mesh, as a loop over the examples has it."""

import pytest
import torch
from torch import nn

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from tests.parallel.private.on_mesh import differences, refusal
from tests.parallel.ranks import call_on_ranks
from tests.training.private import models
from tests.training.private.models import Case, classified

CASES = {
    "MLP": models.mlp,
    "CNN, with a layer without a rule": models.cnn,
    "a layer called twice, and a weight under two names": models.shared,
    "decoder": models.decoder,
    "tied embedding": models.tied,
    "LoRA on a Llama, weights of tokens": models.lora,
}
OF_TP = {
    "decoder": models.wide_decoder,
    "tied decoder": models.tied_decoder,
    "LoRA on a Llama, weights of tokens": models.lora,
}


def check(plan: Plan, cases: dict[str, object], within: float = 1e-8, is_double: bool = True) -> None:
    for rank, found in enumerate(call_on_ranks(differences, plan.mesh.size, cases, plan, is_double)):
        assert {name: each for name, each in found.items() if not each < within} == {}, rank


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(mesh=Mesh(dp_replicate=2)), id="DDP"),
        pytest.param(Plan(mesh=Mesh(dp_shard=2)), id="FSDP"),
        pytest.param(Plan(mesh=Mesh(dp_shard=2), recompute="full"), id="FSDP that computes again"),
        pytest.param(Plan(mesh=Mesh(dp_shard=2), zero=1), id="ZeRO 1", marks=pytest.mark.long),
        pytest.param(Plan(mesh=Mesh(dp_replicate=2, dp_shard=2)), id="HSDP"),
    ],
)
def test_ranks_with_other_rows(plan: Plan) -> None:
    check(plan, dict(CASES))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(mesh=Mesh(tp=2)), id="TP"),
        pytest.param(Plan(mesh=Mesh(tp=2), sequence_parallel=True), id="TP that divides the sequence"),
        pytest.param(Plan(mesh=Mesh(dp_shard=2, tp=2), sequence_parallel=True), id="FSDP and TP"),
        pytest.param(Plan(mesh=Mesh(dp_replicate=2, tp=2)), id="copies and TP", marks=pytest.mark.long),
    ],
)
def test_ranks_that_compute_each_layer_together(plan: Plan) -> None:
    check(plan, dict(OF_TP))


def test_single_and_half_precision() -> None:
    check(Plan(mesh=Mesh(dp_shard=2)), {"decoder": models.decoder, "MLP": models.mlp}, 2e-6, is_double=False)
    check(Plan(mesh=Mesh(dp_shard=2), precision="bf16"), {"decoder": models.decoder}, 0.1, is_double=False)


class Beside(nn.Module):
    """A parameter beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(6, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 6) to (B, 3)."""
        found: torch.Tensor = self.layer(x) + self.shift
        return found


def beside() -> Case:
    return classified(nn.Sequential(Beside()), 6)


def test_a_parameter_beside_layers_has_no_rule_where_it_is_gathered_and_one_under_ddp() -> None:
    for fault in call_on_ranks(refusal, 2, beside, Plan(mesh=Mesh(dp_shard=2))):
        assert fault.startswith("0: Beside has parameters beside its layers: ")
        assert "train with DDP" in fault
    check(Plan(mesh=Mesh(dp_replicate=2)), {"beside": beside})

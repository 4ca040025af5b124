"""The dtypes of a step in bfloat16: on every mesh those of one process under torch's autocast."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atoll.parallel.data.batch import Batch
from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from tests.parallel.engine.cases import cnn_with_norms, mine, plan, tied
from tests.parallel.engine.reference import image_batches, make_optimizer, token_batches, token_loss
from tests.parallel.ranks import call_on_ranks

STEPS = 3
SECONDS = 1.7e9
"""A time of this century: bfloat16 has steps of 8,388,608 s there, float32 of 128 s."""


class Rows(nn.Module):
    """A table whose first column is a number of a shop and the second one a time, both as floats."""

    def __init__(self) -> None:
        super().__init__()
        self.shop = nn.Embedding(1000, 4)
        self.scale = nn.Parameter(torch.tensor(1e-3))
        self.norm = nn.LayerNorm(7)
        self.layers = nn.ModuleList([nn.Linear(7, 8), nn.PReLU(), nn.Linear(8, 1)])
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes = [x.dtype, self.shop.weight.dtype, self.norm.weight.dtype, self.scale.dtype]
        days = (x[:, 1:2] - SECONDS) / 86400 * self.scale
        h = self.norm(torch.cat([self.shop(x[:, 0].long()), days, x[:, 2:].to(self.shop.weight.dtype)], 1))
        for layer in self.layers:
            h = layer(h)
        return h.squeeze(-1)


def rows() -> nn.Module:
    torch.manual_seed(0)
    return Rows()


def rows_chain() -> nn.Module:
    """Return layers of which the first gets the raw table, and a block that takes it, too."""
    torch.manual_seed(0)
    return nn.Sequential(rows_first(), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def rows_first() -> nn.Module:
    class First(Rows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.cat([self.shop(x[:, 0].long()), (x[:, 1:2] - SECONDS) / 86400 * self.scale, x[:, 2:]], 1)
            first: torch.Tensor = self.layers[0](self.norm(h))
            return first

    return First()


def table() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(STEPS):
        inputs = torch.randn(16, 4, generator=generator)
        inputs[:, 0] = torch.arange(16) + 900 + 16 * step
        inputs[:, 1] = SECONDS + 86400 * 10 * inputs[:, 1]
        found.append((inputs, torch.randn(16, generator=generator)))
    return found


def batches_of(model: Callable[[], nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if model is tied:
        return token_batches(64, 16)[:STEPS]
    return image_batches()[:STEPS] if model is cnn_with_norms else table()


def loss_of(model: Callable[[], nn.Module]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    if model is tied:
        return token_loss
    return nn.functional.cross_entropy if model is cnn_with_norms else nn.functional.mse_loss


def losses_of(model: Callable[[], nn.Module], plan: Plan) -> list[float]:
    """Return the losses of the steps, and at last that of an evaluation."""
    axes = Axes(plan.mesh, "cpu") if plan.mesh.size > 1 or plan.is_sharded else None
    loss = loss_of(model)
    optimization = Optimization(loss=loss, make_optimizer=lambda named: make_optimizer("sgd", named))
    engine = assemble(model(), plan, optimization, axes=axes)
    found, evaluated, batches = [], [], batches_of(model)
    for inputs, targets in batches:
        found.append(engine.step(mine(inputs, targets, axes)).loss.item())
    engine.flush()
    engine.evaluate(
        Batch(*batches[0], len(batches[0][1])),
        lambda outputs, targets, rows: evaluated.append(
            loss(outputs.float(), targets).item() * rows / len(batches[0][1])
        ),
    )
    return [*found, sum(evaluated)]


def by_autocast(model: Callable[[], nn.Module]) -> list[float]:
    """Return the losses of a plain loop under autocast."""
    plain, loss, found = model(), loss_of(model), []
    optimizer = make_optimizer("sgd", list(plain.named_parameters()))
    for inputs, targets in batches_of(model):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(plain(inputs).float(), targets)
        value.backward()
        optimizer.step()
        found.append(value.item())
    inputs, targets = batches_of(model)[0]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found.append(loss(plain.eval()(inputs).float(), targets).item())
    return found


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], Plan]]:
    for model in (rows, cnn_with_norms):
        for zero in (1, 3):
            yield f"{model.__name__}-zero{zero}", model, plan(dp_shard=2, zero=zero, precision="bf16", batchnorm="sync")
    yield "rows-ddp", rows, plan(dp_replicate=2, precision="bf16")
    yield "rows-accumulated", rows, plan(dp_shard=2, zero=2, accumulate=2, precision="bf16", recompute="full")
    yield "rows-pp", rows_chain, plan(pp=2, precision="bf16")
    yield "tied-zero3-tp", tied, plan(dp_shard=2, tp=2, precision="bf16", reduce_dtype="bf16")


CASES = {name: (model, plan) for name, model, plan in cases()}


def on_meshes() -> dict[str, list[float]]:
    return {
        name: losses_of(model, plan) for name, (model, plan) in CASES.items() if plan.mesh.size == dist.get_world_size()
    }


@pytest.fixture(scope="module")
def traces() -> dict[str, list[list[float]]]:
    """The losses of each rank by the name of the case."""
    found: dict[str, list[list[float]]] = {}
    for number in (2, 4):
        for of_rank in call_on_ranks(on_meshes, number):
            for name, losses in of_rank.items():
                found.setdefault(name, []).append(losses)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_mesh_casts_what_autocast_casts_and_nothing_else(name: str, traces: dict[str, list[list[float]]]) -> None:
    """The time alone would move the losses by tenths if it were rounded, and the shops would be others."""
    expected = by_autocast(CASES[name][0])
    for found in traces[name]:
        seen = slice(None if found[-1] else -1)  # one rank of a pipeline or of a tensor group observes
        assert found[seen] == pytest.approx(expected[seen], rel=3e-3, abs=3e-3)
    assert any(found[-1] for found in traces[name])


def dtypes_in_a_pass(zero: int) -> tuple[list[torch.dtype], set[torch.dtype]]:
    chosen = plan(dp_shard=2, zero=zero, precision="bf16")
    optimization = Optimization(loss=nn.functional.mse_loss, make_optimizer=lambda named: make_optimizer("sgd", named))
    axes = Axes(chosen.mesh, "cpu")
    engine = assemble(rows(), chosen, optimization, axes=axes)
    engine.step(mine(*table()[0], axes))
    model = engine.parts[0]
    assert isinstance(model, Rows)
    return model.dtypes, {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}


def test_a_forward_pass_reads_inputs_and_small_parameters_in_their_own_dtype() -> None:
    for dtypes, gradients in call_on_ranks(dtypes_in_a_pass, 2, 3):
        assert dtypes == [torch.float32] * 4
        assert gradients == {torch.float32}

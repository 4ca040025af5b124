"""The step beside its losses: evaluation, the noise sample, copies that synchronize rarely, mistakes of a user."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atoll.parallel.data.batch import Batch, count_units
from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import whole
from atoll.parallel.engine.step import Engine
from tests.parallel.engine import reference
from tests.parallel.engine.cases import cnn_with_norms, mine, mlp, small
from tests.parallel.ranks import call_on_ranks
from tests.waiting import BOUND_S


def engine_of(model: nn.Module, plan: Plan, loss: Any = nn.functional.cross_entropy, **options: Any) -> Engine:
    axes = Axes(plan.mesh, "cpu") if plan.mesh.size > 1 or plan.is_sharded else None
    make = options.pop("make_optimizer", lambda named: reference.make_optimizer("sgd", named))
    rows = options.pop("rows", None)
    optimization = Optimization(loss=loss, make_optimizer=make, **options)
    return assemble(model, plan, optimization, axes=axes, rows=rows)


def evaluated(plan: Plan, last: int) -> tuple[float, int]:
    """Correct answers and examples over two batches, added up over the ranks; a training step comes between them."""
    engine = engine_of(mlp(), plan)
    counts = torch.zeros(2)

    def observe(outputs: torch.Tensor, targets: torch.Tensor, rows: int) -> None:
        assert rows == len(targets)
        counts.add_(torch.tensor([float((outputs.argmax(1) == targets).sum()), float(len(targets))]))

    batches = reference.image_batches(last=last)
    for inputs, targets in (batches[0], batches[2]):
        engine.evaluate(mine(inputs, targets, engine.axes), observe)
        engine.step(mine(*batches[1], engine.axes))
    if engine.axes is not None:
        dist.all_reduce(counts)
    return float(counts[0]), int(counts[1])


@pytest.mark.parametrize(
    "plan",
    [
        Plan(mesh=Mesh(dp_replicate=2)),
        Plan(mesh=Mesh(dp_shard=2)),
        Plan(mesh=Mesh(tp=2)),
        Plan(mesh=Mesh(pp=2)),
        Plan(mesh=Mesh(pp=2), schedule="interleaved-1f1b"),
        Plan(mesh=Mesh(pp=2), schedule="zbv-zero-bubble"),
        Plan(mesh=Mesh(pp=2), schedule="dualpipe-v"),
    ],
    ids=["ddp", "fsdp", "tp", "pp", "interleaved", "zbv", "dualpipe"],
)
def test_an_evaluation_sees_every_example_once(plan: Plan) -> None:
    last = 7 if plan.mesh.pp == 1 else 16
    [expected] = [evaluated(Plan(), last)]
    assert call_on_ranks(evaluated, 2, plan, last) == [expected] * 2


def noise_sample(plan: Plan) -> tuple[float, float, float, float]:
    engine = engine_of(small(), plan, reference.token_loss)
    inputs, targets = reference.token_batches(64, 16)[0]
    noise = engine.step(mine(inputs, targets, engine.axes), measure_noise=True).noise
    assert noise is not None
    return noise.small_units, float(noise.small_square), noise.big_units, float(noise.big_square)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(mesh=Mesh(dp_replicate=2)),
        Plan(mesh=Mesh(dp_shard=2), zero=1),
        Plan(mesh=Mesh(dp_shard=2), zero=3),
        Plan(mesh=Mesh(tp=2)),
    ],
    ids=["single", "ddp", "zero-1", "zero-3", "tp"],
)
def test_the_noise_sample_has_the_norms_of_two_plain_gradients(plan: Plan) -> None:
    inputs, targets = reference.token_batches(64, 16)[0]
    ranks = plan.mesh.dp
    halves = [rows[: len(rows) // 2] for rows in torch.arange(16).tensor_split(ranks)]
    first = torch.cat(halves)

    def square(rows: torch.Tensor) -> float:
        model = small()
        reference.token_loss(model(inputs[rows]), targets[rows]).backward()
        return sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)

    expected = (8 * 16, square(first), 16 * 16, square(torch.arange(16)))
    [found, *_] = call_on_ranks(noise_sample, plan.mesh.size, plan) if plan.mesh.size > 1 else [noise_sample(plan)]
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_pipeline_has_no_noise_sample_and_says_so() -> None:
    with pytest.raises(RankFailed, match="a pipeline cannot measure noise"):
        call_on_ranks(noise_sample, 2, Plan(mesh=Mesh(pp=2)))


def after_steps(plan: Plan, optimizer: str, steps: int) -> dict[str, torch.Tensor]:
    engine = engine_of(mlp(), plan, make_optimizer=lambda named: reference.make_optimizer(optimizer, named))
    for inputs, targets in reference.image_batches()[:steps]:
        engine.step(mine(inputs, targets, engine.axes))
    engine.flush()
    return {name: whole(p.detach()).clone() for name, p in engine.parameters.items()}


@pytest.mark.parametrize(("dp_shard", "ranks"), [(1, 2), (2, 4)])
def test_local_sgd_that_meets_in_each_step_is_data_parallel_sgd(dp_shard: int, ranks: int) -> None:
    """The mean of the copies after one plain step is the step along the mean gradient."""
    plan = Plan(mesh=Mesh(dp_replicate=2, dp_shard=dp_shard), outer="local_sgd:1")
    expected = reference.plain_training(mlp(), nn.functional.cross_entropy, reference.image_batches()[:1], "sgd")
    for parameters in call_on_ranks(after_steps, ranks, plan, "sgd", 1):
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected.parameters[name], atol=1e-6, rtol=0)


def test_copies_that_meet_rarely_differ_from_the_plain_loop_and_not_from_each_other() -> None:
    plan = Plan(mesh=Mesh(dp_replicate=2), outer="local_sgd:2")
    expected = reference.plain_training(mlp(), nn.functional.cross_entropy, reference.image_batches(), "sgd")
    first, second = call_on_ranks(after_steps, 2, plan, "sgd", 3)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert max(float((first[name] - expected.parameters[name]).abs().max()) for name in first) > 1e-4


def first_loss(plan: Plan, rows: int) -> float:
    engine = engine_of(mlp(), plan)
    inputs, targets = reference.image_batches()[0]
    return engine.step(mine(inputs[:rows], targets[:rows], engine.axes)).loss.item()


@pytest.mark.parametrize("rows", [16, 5, 1])
def test_the_loss_of_several_copies_weighs_them_by_their_units(rows: int) -> None:
    """The second copy has no share of a batch of one example."""
    expected = first_loss(Plan(), rows)
    plan = Plan(mesh=Mesh(dp_replicate=2), outer="local_sgd:2")
    assert call_on_ranks(first_loss, 2, plan, rows) == pytest.approx([expected] * 2, rel=1e-6)


def compressed_losses(compression: str) -> list[float]:
    engine = engine_of(mlp(), Plan(mesh=Mesh(dp_replicate=2), compression=compression))
    inputs, targets = reference.image_batches()[0]
    return [engine.step(mine(inputs, targets, engine.axes)).loss.item() for _ in range(30)]


def test_compressed_gradients_train_through_the_plan() -> None:
    plain, compressed = call_on_ranks(compressed_losses, 2, "none")[0], call_on_ranks(compressed_losses, 2, "onebit")[0]
    assert compressed != plain
    assert compressed[-1] < 0.5 * compressed[0]


def test_ghost_batch_norm_is_that_of_the_ghosts_by_themselves() -> None:
    """Oracle: torch's own batch norm on each half, one after another."""
    inputs, targets = reference.image_batches()[0]
    engine = engine_of(cnn_with_norms(), Plan(batchnorm="ghost:8"))
    loss = engine.step(Batch(inputs, targets, count_units(targets))).loss.item()
    plain = cnn_with_norms()
    first = plain.get_submodule("features.0")
    outputs = torch.cat([first(half) for half in inputs.split(8)])
    second = plain.get_submodule("features.1")
    outputs = torch.cat([second(half) for half in outputs.split(8)])
    logits = plain.get_submodule("head")(outputs.flatten(1))
    assert loss == pytest.approx(nn.functional.cross_entropy(logits, targets).item(), abs=1e-6)
    buffers = dict(engine.parts[0].named_buffers())
    for name, value in plain.named_buffers():
        torch.testing.assert_close(buffers[name], value)


def test_the_learning_rate_is_a_function_of_the_step() -> None:
    seen: list[int] = []

    def lr(step: int) -> float:
        seen.append(step)
        return 0.0

    engine = engine_of(mlp(), Plan(), lr=lr)
    before = {name: p.detach().clone() for name, p in engine.parameters.items()}
    for inputs, targets in reference.image_batches():
        engine.step(Batch(inputs, targets, len(targets)))
    assert seen == [0, 1, 2]
    assert all(torch.equal(before[name], p) for name, p in engine.parameters.items())


def fails_on_one_rank(rank: int) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == rank:
            raise RuntimeError("this loss is not for everybody")
        return nn.functional.cross_entropy(outputs, targets)

    engine = engine_of(mlp(), Plan(mesh=Mesh(dp_shard=2)), loss)
    engine.step(mine(*reference.image_batches()[0], engine.axes))


def test_a_rank_that_fails_is_heard_and_brings_the_others_down() -> None:
    with pytest.raises(RankFailed, match="this loss is not for everybody"):
        call_on_ranks(fails_on_one_rank, 2, 1, timeout_s=BOUND_S)


def test_a_gradient_that_is_no_number_is_seen_in_the_norm() -> None:
    engine = engine_of(mlp(), Plan(), lambda outputs, targets: outputs.sum() * math.nan)
    measured = engine.step(Batch(*reference.image_batches()[0], 16))
    assert measured.grad_norm is not None
    assert math.isnan(measured.grad_norm.item())


def one_step(
    model: Callable[[], nn.Module], plan: Plan, batches: Any, loss: Any = nn.functional.cross_entropy
) -> float:
    engine = engine_of(model(), plan, loss)
    return engine.step(mine(*batches[0], engine.axes)).loss.item()


@pytest.mark.parametrize("plan", [Plan(mesh=Mesh(tp=2)), Plan(mesh=Mesh(tp=2, pp=2))], ids=["tp", "pp x tp"])
def test_a_sequence_that_tp_does_not_divide_is_refused_on_every_rank(plan: Plan) -> None:
    with pytest.raises(RankFailed, match=r"tp=2 must divide the length of the sequence \(sequence_parallel\), got 15"):
        call_on_ranks(one_step, plan.mesh.size, small, plan, reference.token_batches(64, 15), reference.token_loss)


def step_with_a_dict() -> None:
    engine = engine_of(mlp(), Plan(mesh=Mesh(pp=2)))
    inputs, targets = reference.image_batches()[0]
    engine.step(Batch({"images": inputs}, targets, len(targets)))


def test_a_pipeline_that_is_not_given_one_tensor_says_so() -> None:
    with pytest.raises(RankFailed, match=r"a pipeline's inputs must be one tensor, got dict"):
        call_on_ranks(step_with_a_dict, 2)


def loss_of_each(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_a_loss_that_is_no_single_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a single number, the mean over the batch; got shape \(16,\)"):
        one_step(mlp, Plan(), reference.image_batches(), loss_of_each)
    with pytest.raises(RankFailed, match=r"a single number, the mean over the batch; got shape"):
        call_on_ranks(one_step, 2, mlp, Plan(mesh=Mesh(pp=2)), reference.image_batches(), loss_of_each)


@pytest.mark.parametrize("zero", [0, 3])
def test_the_loss_of_a_bf16_model_has_the_digits_of_float32(zero: int) -> None:
    """A loss of about 2 comes in steps of 1/64 in bfloat16."""
    plan = Plan(precision="bf16", zero=zero)
    [loss] = call_on_ranks(one_step, 1, mlp, plan, reference.image_batches())
    assert loss != float(torch.tensor(loss).bfloat16())


class Masked(nn.Module):
    """Half of its outputs are excluded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        masked: torch.Tensor = self.inner(images).masked_fill(torch.arange(10) >= 5, -math.inf)
        return masked


def test_a_filler_s_outputs_may_be_infinite() -> None:
    inputs, _ = reference.image_batches()[0]
    assert one_step(Masked, Plan(), [(inputs, torch.full((16,), -100))]) == 0.0


@pytest.mark.parametrize(("kind", "passes"), [("none", 1), ("full", 2)])
def test_a_recomputed_block_is_computed_twice(kind: str, passes: int) -> None:
    engine = engine_of(mlp(), Plan(recompute=kind))
    calls: list[str] = []
    inner = engine.parts[0].get_submodule("layers.0.0")
    inner.register_forward_hook(lambda *_: calls.append("forward"))
    engine.step(Batch(*reference.image_batches()[0], 16))
    assert len(calls) == passes


def test_dropout_is_for_steps_and_not_for_evaluations() -> None:
    engine = engine_of(nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.5)), Plan())
    batch = Batch(*reference.image_batches()[0], 16)
    seen: list[torch.Tensor] = []
    engine.evaluate(batch, lambda outputs, _targets, _rows: seen.append(outputs))
    engine.evaluate(batch, lambda outputs, _targets, _rows: seen.append(outputs))
    assert torch.equal(seen[0], seen[1])
    assert not (seen[0] == 0).any()
    engine.step(batch)
    assert all(module.training for module in engine.parts[0].modules())

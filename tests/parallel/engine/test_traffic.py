"""The traffic and the memory of a rank in a real step over gloo, beside the formulas.

Legend: M bytes of the parameters in float32, N ranks, k micro-batches of a step.
"""

import gc
from collections import Counter

import pytest
import torch
from torch import nn

from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.mesh import AXES, Mesh
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.models.decoder import Decoder, DecoderConfig
from atoll.parallel.planner.counting import Watch
from tests.parallel.engine import reference
from tests.parallel.engine.cases import mine
from tests.parallel.ranks import call_on_ranks

CONFIG = DecoderConfig(vocab=64, dim=64, layers=4, heads=4, ffn=128, sequence=16)
LAYERS = 4

Calls = dict[tuple[str, str], tuple[int, int]]
"""(axis, kind) -> calls and bytes."""


def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIG)


def num_bytes(of: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in of.parameters())


def measured(plan: Plan) -> tuple[Calls, list[int]]:
    """Calls and bytes of the second step; and what is alive before each of its micro-batches but the first."""
    axes = Axes(plan.mesh, "cpu")
    engine = assemble(
        model(),
        plan,
        Optimization(loss=reference.token_loss, make_optimizer=lambda named: reference.make_optimizer("adamw", named)),
        axes=axes,
    )
    batch = mine(*reference.token_batches(64, 16)[0], axes)
    engine.step(batch, total=16 * 16, report=False)
    axis_of = {axes.group(axis).group_name: axis for axis in AXES}
    watch = Watch(lambda name: axis_of.get(name, name))
    for optimizer in engine.optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                watch.hold(getattr(value, "to_local", lambda value=value: value)())
    for parameter in engine.parameters.values():
        watch.hold(getattr(parameter, "to_local", lambda parameter=parameter: parameter)().detach())
    alive: list[int] = []

    def look(_module: nn.Module, _inputs: object) -> None:
        gc.collect()  # what only a cycle of references still holds does not count
        watch._recount()
        alive.append(watch.alive)

    engine.parts[0].register_forward_pre_hook(look, prepend=True)
    with watch:
        engine.step(batch, total=16 * 16, report=False)
    counted: Counter[tuple[str, str]] = Counter()
    travelled: Counter[tuple[str, str]] = Counter()
    for call in watch.collectives:
        counted[call.axis, call.kind] += 1
        travelled[call.axis, call.kind] += call.num_bytes
    return {key: (counted[key], travelled[key]) for key in counted}, alive[1:]


GROUPS = LAYERS + 1
"""The units that `fully_shard` gathers and scatters: each block, and the rest."""


@pytest.mark.parametrize(
    ("zero", "micro_batches", "gathers", "scatters"),
    [(1, 1, 1, 1), (1, 4, 1, 1), (2, 1, 1, 1), (2, 4, 1, 4), (3, 1, 2, 1), (3, 4, 8, 4)],
)
def test_zero_sends_what_its_stage_says(zero: int, micro_batches: int, gathers: int, scatters: int) -> None:
    """ZeRO 1 and 2: M gathered and M scattered, twice the parameters as an all-reduce has; ZeRO 3: three times."""
    size = num_bytes(model())
    plan = Plan(mesh=Mesh(dp_shard=2), zero=zero, accumulate=micro_batches)
    for calls, _ in call_on_ranks(measured, 2, plan):
        assert calls == {
            ("dp_shard", "all_gather"): (gathers * GROUPS, gathers * size),
            ("dp_shard", "reduce_scatter"): (scatters * GROUPS, scatters * size),
        }


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_ddp_sends_its_gradients_once(micro_batches: int) -> None:
    for calls, _ in call_on_ranks(measured, 2, Plan(mesh=Mesh(dp_replicate=2), accumulate=micro_batches)):
        assert calls["dp_replicate", "all_reduce"][1] == num_bytes(model())


def test_hsdp_adds_up_shards_across_copies() -> None:
    size = num_bytes(model())
    for calls, _ in call_on_ranks(measured, 4, Plan(mesh=Mesh(dp_replicate=2, dp_shard=2))):
        assert calls["dp_shard", "all_gather"] == (2 * GROUPS, 2 * size)
        assert calls["dp_shard", "reduce_scatter"] == (GROUPS, size)
        assert calls["dp_replicate", "all_reduce"] == (GROUPS, size // 2)


def test_tensor_parallelism_adds_up_twice_in_each_block_and_direction() -> None:
    """The embedding adds one more; the head's logits are gathered, the gradient of its input is summed."""
    for calls, _ in call_on_ranks(measured, 2, Plan(mesh=Mesh(tp=2), sequence_parallel=False)):
        assert calls["tp", "all_reduce"][0] == 4 * LAYERS + 2
        assert calls["tp", "all_gather"][0] == 1


def test_sequence_parallelism_has_the_halves_of_those() -> None:
    for calls, _ in call_on_ranks(measured, 2, Plan(mesh=Mesh(tp=2))):
        assert calls["tp", "reduce_scatter"][0] == 4 * LAYERS + 2
        assert calls["tp", "all_gather"][0] == 4 * LAYERS + 3  # and the logits


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients"), [(1, 1 + 1 / 2, 1), (2, 1 + 1 / 2, 1 / 2), (3, 1 / 2, 1 / 2)]
)
def test_what_lies_on_a_rank_between_two_passes(zero: int, parameters: float, gradients: float) -> None:
    """The memory in M: the shards, with ZeRO 1 and 2 also the whole; gradients, whole or shards; Adam's two moments."""
    size = num_bytes(model())
    plan = Plan(mesh=Mesh(dp_shard=2), zero=zero, accumulate=2)
    for _, alive in call_on_ranks(measured, 2, plan):
        assert alive == [pytest.approx((parameters + gradients + 2 / 2) * size, rel=0.05)]


def test_nothing_travels_where_one_rank_trains() -> None:
    [(calls, _)] = call_on_ranks(measured, 1, Plan())
    assert calls == {}

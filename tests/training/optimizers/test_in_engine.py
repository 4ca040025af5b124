"""The layer-wise optimizers in the engine: every way to cut the model gives the losses of one process."""

from functools import partial

import pytest
from torch import nn

from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.training.optimizers.make import make_optimizer
from atoll.training.optimizers.options import OptimizerConfig
from atoll.training.optimizers.schedule import Schedule
from tests.parallel.engine import reference
from tests.parallel.engine.cases import mine, mlp
from tests.parallel.ranks import call_on_ranks

PLANS = [Plan(mesh=Mesh(dp_shard=2), zero=3), Plan(mesh=Mesh(tp=2)), Plan(mesh=Mesh(pp=2))]
CONFIGS = [OptimizerConfig(name="lars", lr=0.5, trust=0.02), OptimizerConfig(name="lamb", lr=0.02)]


def losses(plan: Plan, config: OptimizerConfig) -> list[float]:
    """Return the losses of three steps; the second and the third show the effect of the optimizer."""
    engine = assemble(
        mlp(),
        plan,
        Optimization(
            loss=nn.functional.cross_entropy,
            make_optimizer=partial(make_optimizer, config),
            lr=Schedule(lr=config.lr, steps=3, warmup_steps=2, kind="cosine"),
        ),
        axes=Axes(plan.mesh, "cpu") if plan.mesh.size > 1 else None,
    )
    return [float(engine.step(mine(*batch, engine.axes)).loss) for batch in reference.image_batches()[:3]]


def every_loss() -> list[list[float]]:
    return [losses(plan, config) for plan in PLANS for config in CONFIGS]


def test_every_way_to_cut_the_model_gives_the_losses_of_one_process() -> None:
    alone = [losses(Plan(), config) for _ in PLANS for config in CONFIGS]
    for found in call_on_ranks(every_loss, 2):
        for ours, expected in zip(found, alone, strict=True):
            assert ours == pytest.approx(expected, rel=2e-5)

"""Checkpoints of an engine: a run changes its mesh twice and trains as one that never has."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.parallel.checkpoint.checkpointer import Checkpointer
from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import whole
from atoll.parallel.engine.step import Engine
from atoll.parallel.engine.ties import tied_names
from tests.parallel.engine import reference
from tests.parallel.engine.cases import SEQUENCE, VOCAB, mine, tied
from tests.parallel.forked import run_ranks

ALONE = Plan()
CUBE = Plan(mesh=Mesh(pp=2, dp_shard=2, tp=2))


def engine_of(plan: Plan) -> tuple[Engine, list[list[str]], Axes | None]:
    model = tied()
    names = tied_names(model)
    axes = Axes(plan.mesh, "cpu") if plan.mesh.size > 1 else None
    made = assemble(
        model,
        plan,
        Optimization(loss=reference.token_loss, make_optimizer=lambda named: reference.make_optimizer("adamw", named)),
        axes=axes,
    )
    return made, names, axes


def go_on(folder: Path, plan: Plan, begin: int, end: int) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Load unless it is the beginning, train from step to step, and save; what there was first and last, the losses."""
    engine, names, axes = engine_of(plan)
    batches = reference.token_batches(VOCAB, SEQUENCE)
    losses = []
    with Checkpointer(folder, mesh=plan.mesh.degrees, tied=names) as checkpointer:
        if begin:
            path = checkpointer.latest()
            assert path is not None
            restored = checkpointer.load(engine.parts, engine.optimizers, path)
            assert (restored.step, restored.is_same_mesh) == (begin, False)
        first = everything(engine)
        for step in range(begin, end):
            losses.append(engine.step(mine(*batches[step], axes)).loss.item())
        last = everything(engine)
        checkpointer.save(engine.parts, engine.optimizers, {}, end)
    return first, last, losses


def everything(engine: Engine) -> dict[str, Any]:
    found = {}
    for part, optimizer in zip(engine.parts, engine.optimizers, strict=True):
        for name, parameter in part.named_parameters():
            found[name] = array(parameter)
            found |= {f"{name} {key}": array(value) for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def array(tensor: torch.Tensor) -> Any:
    return whole(tensor.detach()).numpy().copy()


def test_one_process_then_three_axes_then_one_process_is_one_training(tmp_path: Path) -> None:
    batches = reference.token_batches(VOCAB, SEQUENCE)
    expected = reference.plain_training(tied(), reference.token_loss, batches, "adamw")
    _, saved, losses = go_on(tmp_path, ALONE, 0, 1)
    for first, _, loss in (ranks := run_ranks(go_on, 8, tmp_path, CUBE, 1, 2)):
        assert any(name.endswith("exp_avg_sq") for name in first)
        for name, value in first.items():
            assert np.array_equal(value, saved.get(name, saved_as_first(saved, name))), name
        assert loss == ranks[0][2]
    cube: dict[str, Any] = {}
    for _, last, _ in ranks:
        cube |= last
    losses += ranks[0][2]
    found, _, rest = go_on(tmp_path, ALONE, 2, 3)
    assert all(np.array_equal(value, cube[name]) for name, value in found.items())
    assert np.allclose(losses + rest, expected.losses, atol=5e-6, rtol=0)


def saved_as_first(saved: dict[str, Any], name: str) -> Any:
    """The copy of the tied weight on the last stage has what the embedding has."""
    ((first, alias),) = tied_names(tied())
    return saved[name.replace(alias, first)]

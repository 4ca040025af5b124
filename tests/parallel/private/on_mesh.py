"""Clipped sums on the ranks of a mesh, beside those of a plain loop."""

from collections.abc import Callable

import torch

from atoll.parallel.data.batch import Batch, map_tensors
from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.private.mesh_gradients import MeshGradients
from atoll.training.private.captured_gradients import NotCaptured
from atoll.training.private.example_gradients import SLACK
from tests.training.private.models import Case, loop

CLIP_QUANTILE = 3
"""Of six rows, so that some are clipped and some are not."""


def differences(cases: dict[str, Callable[[], Case]], plan: Plan, is_double: bool = True) -> dict[str, float]:
    """Return the largest difference of each case."""
    return {name: largest_difference(make, plan, is_double) for name, make in cases.items()}


def refusal(make: Callable[[], Case], plan: Plan) -> str:
    """Return the refusal of a model's layers on a mesh."""
    case = make()
    axes = Axes(plan.mesh, "cpu")
    optimization = Optimization(loss=case.loss, make_optimizer=lambda named: torch.optim.SGD([p for _, p in named]))
    part = assemble(case.model, plan, optimization, axes=axes).parts[0]
    try:
        MeshGradients(part, case.loss, 1.0, plan=plan, axes=axes, device=torch.device("cpu"), at_once=2)
    except NotCaptured as error:
        return str(error)
    return ""


def largest_difference(make: Callable[[], Case], plan: Plan, is_double: bool = True, at_once: int = 2) -> float:
    """Return the largest difference from a loop in what this rank holds of the sum, over the bound C.

    The first rank of data parallelism has all rows but one, the second has that one, and further ones have none.
    """
    dtype = torch.float64 if is_double else torch.float32
    torch.manual_seed(0)  # the same model on each rank
    case = make()
    case.model.to(dtype)
    case.inputs = map_tensors(lambda each: each.to(dtype) if each.is_floating_point() else each, case.inputs)
    case.model.train()
    _, norms = loop(case, 1e9)
    bound = sorted(norms)[CLIP_QUANTILE]
    expected, _ = loop(case, bound / (1 + SLACK))
    assert max(float(each.abs().max()) for each in expected.values()) > 1e-3 * bound
    axes = Axes(plan.mesh, "cpu")
    optimization = Optimization(
        loss=case.loss, make_optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    )
    engine = assemble(case.model, plan, optimization, axes=axes)
    sums = MeshGradients(
        engine.parts[0],
        case.loss,
        bound,
        plan=plan,
        axes=axes,
        device=torch.device("cpu"),
        at_once=at_once,
        agreement=next(iter(engine.agreements), None),
    )
    lengths = [case.rows - 1, 1, 0, 0] if plan.mesh.dp > 1 else [case.rows]
    mine = torch.arange(case.rows).split(lengths)[axes.dp_rank]
    rows = mine if len(mine) else torch.zeros(1, dtype=torch.int64)
    inputs, targets = map_tensors(lambda each: each[rows], (case.inputs, case.targets))
    batch = Batch(inputs, targets, 1.0, rows=len(mine), is_filler=not len(mine))
    worst = 0.0
    for _ in range(2):  # the second step finds the model as the first one did
        found = sums.of_batch(batch)
        assert found.keys() == expected.keys()
        for name, each in found.items():
            part = expected[name][sums.boxes[name].slices]
            assert part.shape == each.shape, name
            if each.numel():
                worst = max(worst, float((part - each).abs().max()))
        assert all(parameter.grad is None for parameter in engine.parts[0].parameters())
    return worst / bound

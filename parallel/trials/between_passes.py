"""Trial of state that a forward pass leaves for the next ones: running sums, centres, queues, counts.

Each rank of a mesh sees other examples. What it keeps of them is not what one process keeps of all, so its results
differ. Whether a model or a loss does so is decided by running it: on the same rows,
after other ones.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from atoll.parallel.data.batch import tensors
from atoll.parallel.engine.buffers import saved_buffers
from atoll.parallel.trials.way import MeshWay
from atoll.task.randomness import seeded
from atoll.training.trials.trial import undone

OWN_EXAMPLES = (
    "a pass leaves values there that depend on its examples, and each rank sees different ones, so {mesh} cannot "
    "compute what one process does: train in one process, or on a mesh of tp alone"
)
"""The end of a refusal."""

OWN_STATE = ("the model's state outside of buffers", "the loss's state", "the model's state for evaluation")
"""The names of state that shows in outputs, in the loss, and in outputs of an evaluation alone."""

ROWS = 8
"""Rows that are compared: of one class, or of two, many things look alike."""

Values = dict[str, torch.Tensor]


def follows_examples(way: MeshWay) -> Iterator[str]:
    """Yield a sentence if a task's model or loss keeps values that depend on a rank's examples.

    Norms of torch are left out: `plan.batchnorm` says what theirs are.
    """
    data = way.data
    if not way.is_small or way.plan.mesh.dp == 1 or len(data) < 2:
        return
    count = min(ROWS, max(2, len(data) // 2))
    fewer = count - (count > 2)  # by chance two parts of one size may have the same classes
    first, last = torch.arange(count), torch.arange(max(len(data) // 2, len(data) - fewer), len(data))
    spread = torch.arange(count) * len(data) // count  # rows may be sorted by classes
    try:
        one, other = (_after(way, rows, spread) for rows in (first, last))
    except Exception:  # the first step reports it
        return
    if differing := _differing(one, other):
        yield f"{', '.join(differing[:3])}: {OWN_EXAMPLES.format(mesh=way.plan.mesh)}"


def repeats(way: MeshWay) -> Iterator[str]:
    """Yield a sentence about state that a step changes once in each of its passes, and one process once.

    Of a large model the buffers alone are known. Norms have `plan.batchnorm`.
    """
    number = way.plan.microbatches
    if number > 1 and (names := way.effects.moved or (_moved_outside(way) if way.is_small else [])):
        yield (
            f"{', '.join(names[:4])}: each forward pass changes them, and a step has {number} passes, one for each "
            f"micro-batch: they change {number} times a step, in one pass over the batch once (plan.accumulate=1"
            f"{', plan.num_microbatches=1' if way.plan.mesh.pp > 1 else ''} has one)"
        )


def repeats_at_a_site(way: MeshWay) -> Iterator[str]:
    """Yield a client's refusal of state that `repeats` names, and of other tensors that a pass changes in place."""
    number, written = way.plan.microbatches, way.effects.written
    if number > 1 and (names := [*written.parameters, *written.buffers] or _moved_outside(way)):
        yield (
            f"{', '.join(names)}: each forward pass changes them, and a step has {number} passes, one for each "
            "micro-batch; allowed: 1 micro-batch, or a model without them"
        )


def _moved_outside(way: MeshWay) -> list[str]:
    """Return the names of state beside buffers that two passes over the same rows change otherwise than one."""
    rows = torch.arange(min(2, len(way.data)))
    try:
        once, twice = (_after(way, rows, rows, passes) for passes in (1, 2))
    except Exception:  # the first step reports it
        return []
    return _differing({name: once[name] for name in OWN_STATE}, twice)


def _differing(one: Values, other: Values) -> list[str]:
    """Return the names of the buffers that differ; if none does, of other state with different effects."""
    found = [name for name, value in one.items() if not _is_same(value, other[name])]
    return [name for name in found if name not in OWN_STATE] or found[:1]


def _after(way: MeshWay, rows: torch.Tensor, probe: torch.Tensor, passes: int = 1) -> Values:
    """Return the buffers of a new model after passes over some rows, and its outputs and loss of other rows then."""
    with undone(model=way.task.model), undone(loss=way.task.loss) as of_loss:
        loss = way.task.loss if of_loss.is_complete else None
        model = way.new_model()
        for module in model.modules():
            if isinstance(module, _NormBase):
                module.momentum = 0.0
        model.train()
        for _ in range(passes):
            _run(way, model, loss, rows)
        found = {
            f"{prefix}.{name}".removeprefix("."): buffer.clone()
            for prefix, module in model.named_modules()
            for holder, name, buffer in saved_buffers(module)
            if holder is module and not isinstance(module, _NormBase)
        }
        of_model, with_loss = _run(way, model, loss, probe)
        model.eval()
        of_evaluation, _ = _run(way, model, None, probe)
        return found | dict(zip(OWN_STATE, (of_model, with_loss, of_evaluation), strict=True))


def _run(way: MeshWay, model: nn.Module, loss: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the loss of some rows, each as one vector; a data set may draw them."""
    with seeded(way.seed):
        inputs, targets = way.rows(rows)
        outputs = model(inputs)
        value = outputs if loss is None else loss(outputs, targets)
    return _vector(outputs), _vector(value)


def _vector(tree: Any) -> torch.Tensor:
    found = [tensor.detach().double().reshape(-1) for tensor in tensors(tree) if not tensor.is_complex()]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *found])


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same to rounding."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-5, atol=1e-8, equal_nan=True)

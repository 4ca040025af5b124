"""The trial of what a forward pass leaves for the next ones: running sums, centres, queues, counts.

Each rank of a mesh sees other examples. What it keeps of them is not what one process keeps of all, so its results
differ. Whether a model or a loss does so is decided by running it: on the same rows,
after other ones.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from atoll.parallel.data.batch import tensors
from atoll.parallel.engine.buffers import saved_buffers
from atoll.parallel.engine.plan import Plan
from atoll.task.randomness import seeded
from atoll.task.task import Task
from atoll.training.data.batches import fetcher
from atoll.training.model.as_built import AsBuilt
from atoll.training.model.compiled import in_place
from atoll.training.trials.repeatable import repeatable

OWN_EXAMPLES = (
    "a pass leaves values there that depend on its examples, and each rank sees others, so {mesh} cannot compute what "
    "one process does: train in one process, or on a mesh of tp alone"
)
"""The end of a refusal."""

OWN_STATE = ("the model's state outside of buffers", "the loss's state", "the model's state for evaluation")
"""The names of state that shows in outputs, in the loss, and in outputs of an evaluation alone."""

ROWS = 8
"""Rows that are compared: of one class, or of two, many things look alike."""

Values = dict[str, torch.Tensor]


def follows_examples(task: Task, plan: Plan, seed: int, data: Any) -> str | None:
    """Return the sentence that a task keeps what depends on a rank's examples; None: it does not, or cannot be run.

    Norms of torch are left out: `plan.batchnorm` says what theirs are.

    Args:
        task: of the model and the loss.
        plan: of the training.
        seed: of the model.
        data: the training data, of which a few examples are read.
    """
    if plan.mesh.dp == 1 or len(data) < 2:
        return None
    count = min(ROWS, max(2, len(data) // 2))
    fewer = count - (count > 2)  # by chance two parts of one size may have the same classes
    first, last = torch.arange(count), torch.arange(max(len(data) // 2, len(data) - fewer), len(data))
    spread = torch.arange(count) * len(data) // count  # rows may be sorted by classes
    try:
        one, other = (_after(task, seed, data, rows, spread) for rows in (first, last))
    except Exception:  # the first step reports it
        return None
    if not (differing := _differing(one, other)):
        return None
    return f"{', '.join(differing[:3])}: {OWN_EXAMPLES.format(mesh=plan.mesh)}"


def moves_by_pass(task: Task, seed: int, data: Any) -> list[str]:
    """Return what, beside buffers, is another after two passes over the same rows than after one; nothing if none runs.

    Args:
        task: of the model and the loss.
        seed: of the model.
        data: the training data, of which a few examples are read.
    """
    rows = torch.arange(min(2, len(data)))
    before = AsBuilt({"model": task.model, "loss": task.loss}, with_process=True)
    try:
        once, twice = (_after(task, seed, data, rows, rows, passes) for passes in (1, 2))
    except Exception:  # the first step reports it
        return []
    finally:
        before.restore()
    return _differing({name: once[name] for name in OWN_STATE}, twice)


def _differing(one: Values, other: Values) -> list[str]:
    """Return the names of the buffers that differ; only where none does, of the state whose effects do."""
    found = [name for name, value in one.items() if not _is_same(value, other[name])]
    return [name for name in found if name not in OWN_STATE] or found[:1]


def _after(task: Task, seed: int, data: Any, rows: torch.Tensor, probe: torch.Tensor, passes: int = 1) -> Values:
    """Return the buffers of a new model after passes over some rows, and what it then makes of others."""
    with seeded(seed):
        model = in_place(task.model())
        loss = repeatable(task.loss)
    for module in model.modules():
        if isinstance(module, _NormBase):
            module.momentum = 0.0
    model.train()
    for _ in range(passes):
        _run(model, loss, seed, data, rows)
    found = {
        f"{prefix}.{name}".removeprefix("."): buffer.clone()
        for prefix, module in model.named_modules()
        for holder, name, buffer in saved_buffers(module)
        if holder is module and not isinstance(module, _NormBase)
    }
    of_model, of_loss, of_evaluation = OWN_STATE
    found[of_model], found[of_loss] = _run(model, loss, seed, data, probe)
    model.eval()
    found[of_evaluation], _ = _run(model, None, seed, data, probe)
    return found


def _run(model: nn.Module, loss: Any, seed: int, data: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the loss of some rows, each as one vector; a data set may draw them."""
    with seeded(seed):
        inputs, targets = fetcher(data)(rows)
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

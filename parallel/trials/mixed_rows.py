"""Trial of code that mixes the rows of a batch, so that its gradient is not the mean of its parts' gradients.

    g(batch) = sum_p u_p g(part p) / sum_p u_p        u_p: the units of part p; of a sum the factors are 1

Ranks with different data, and micro-batches, compute the right side. A contrastive loss, features less the mean of
their batch, an embedding scaled by frequencies, experts with a capacity, or padding that counts have another left side.
Whether a task has one is decided by computing both, of a few rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from atoll.parallel.trials.way import MeshWay
from atoll.task.errors import TaskBroken
from atoll.task.randomness import seeded
from atoll.training.data.draws import drawing
from atoll.training.data.trees import map_tensors
from atoll.training.data.units import units_in, units_of
from atoll.training.trials.contract import one_loss
from atoll.training.trials.trial import undone
from atoll.training.trials.unit_check import disagreement

ROWS = 8
"""Rows of the batch, which is compared with its halves."""

TOLERANCE = 1e-3
"""The largest distance of two gradients, as a fraction of their norms, that is rounding."""


def mixes_rows(way: MeshWay) -> Iterator[str]:
    """Yield the sentence that a plan computes another gradient than one process.

    The cause: the gradient of a batch is not the mean of its parts' gradients. Norms of torch are left out:
    `plan.batchnorm` states their statistics.
    """
    plan, rows = way.plan, min(ROWS, len(way.data))
    if (plan.mesh.dp == 1 and plan.microbatches == 1) or rows < 4 or not way.is_small:
        return
    try:
        with undone(model=way.task.model), undone(loss=way.task.loss) as of_loss:
            found = _Gradients(way).distance() if of_loss.is_complete else 0.0
    except Exception:  # any: of the task's code; the first step reports it
        return
    if not found > TOLERANCE:
        return
    parts = [
        *([f"each of {plan.mesh.dp} ranks"] if plan.mesh.dp > 1 else []),
        *([f"each of {plan.microbatches} micro-batches"] if plan.microbatches > 1 else []),
    ]
    yield (
        f"the gradient of a batch is not the mean of its parts' (of {rows} rows and their halves it is "
        f"{found:.2g} of its norm away): the model, the loss or the collation mixes rows, as a contrastive loss does, "
        f"and {' and '.join(parts)} sees its own, so the training is another one than in one process with whole batches"
    )


class _Gradients:
    """Gradients of a new model of a task, of a batch and of its parts."""

    def __init__(self, way: MeshWay) -> None:
        self._seed, self._units, self._loss = way.seed, units_of(way.task), way.task.loss
        self._model = way.new_model()
        for parameter in self._model.parameters():
            for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
                if hooks:  # the engine calls them after the sums
                    hooks.clear()
        self._fetch, count = drawing(way.data, way.seed), min(ROWS, len(way.data))
        self._indices = torch.arange(count) * len(way.data) // count

    def distance(self) -> float:
        """Return the distance of the batch's gradient from its parts' mean, relative to their norms; 0: unknown."""
        for is_training in (True, False):
            self._model.train(is_training)
            for module in self._model.modules():
                if isinstance(module, _NormBase | _DropoutNd):
                    module.eval()
            whole, _ = self._of(self._indices)
            again, _ = self._of(self._indices, 1)
            if torch.allclose(whole, again, rtol=1e-5, atol=1e-9):  # it draws nothing, and keeps nothing that counts
                break
        else:
            return 0.0
        half = len(self._indices) // 2
        parts = [self._of(indices) for indices in (self._indices[:half], self._indices[half:])]
        weights = [1.0 if self._units.is_sum else units for _, units in parts]
        total = 1.0 if self._units.is_sum else sum(weights)
        if not total:
            return 0.0
        found = torch.stack([part * (weight / total) for (part, _), weight in zip(parts, weights, strict=True)])
        scale = max(float(whole.norm()), float(found.norm(dim=1).sum()))
        return float((found.sum(0) - whole).norm()) / scale if scale else 0.0

    def _of(self, indices: torch.Tensor, offset: int = 0) -> tuple[torch.Tensor, float]:
        """Return the gradient of some rows as one vector, and their units."""
        inputs, targets = self._fetch(0, indices)
        with seeded(self._seed + offset):
            outputs = self._model(inputs)
            if not self._units.is_said and disagreement(self._loss, self._units, _detached(outputs), targets):
                raise TaskBroken("the units of the loss are guessed, and wrong")  # its check refuses it
            loss = one_loss(self._loss(outputs, targets), is_trained=True)
            trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            found = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
        vector = torch.cat([gradient.detach().to_dense().reshape(-1).double() for gradient in found])
        return vector, float(units_in(self._units, targets, len(indices)))


def _detached(tree: Any) -> Any:
    return map_tensors(torch.Tensor.detach, tree)

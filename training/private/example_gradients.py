r"""The sum of clipped example gradients: each example's whole gradient has at most the norm C before it is added.

    sum_i g_i min(1, C / ||g_i||)          g_i: gradient of the loss of row i alone, over all trained parameters

A row's loss is `loss(model(row), targets of the row)`, called on a batch of one: a mean over tokens is the mean over
the tokens of this row. The gradients of many rows are computed at once by `torch.func` (`vmap` of `grad`), in parts of
the batch that fit a bound of memory. A weight that a model has under two names is one parameter, its uses are added
before the norm. A row whose gradient is not finite adds zero.

Source: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from atoll.ground.printable import count_of
from atoll.task.errors import TaskBroken
from atoll.training.data.trees import map_tensors, tensors
from atoll.training.trials.contract import one_loss

Loss = Callable[[Any, Any], torch.Tensor]
"""(outputs, targets) of one row -> its loss."""

Gradients = dict[str, torch.Tensor]

BYTES_MAX = 256 << 20
"""Most memory of the example gradients that exist at once [bytes]."""

SLACK = 1e-6
"""Relative error of a norm in float32, by which the clipped gradient stays below C."""

_COPIES = 3
"""Tensors of the size of an example's gradient that exist at once: it, what the backward pass adds up, and its part."""


class NotRows(TaskBroken):
    """A batch that does not consist of rows: a tensor's first dimension is no number of examples."""


class ExampleGradients:
    """The clipped sum of a model's example gradients.

    Args:
        model: the model, in training mode on its device.
        loss: the loss of a row.
        clip_norm: C, above 0.
        bytes_max: most memory of the example gradients that exist at once [bytes].
    """

    def __init__(self, model: nn.Module, loss: Loss, clip_norm: float, *, bytes_max: int = BYTES_MAX) -> None:
        self._model, self._loss, self._clip_norm = model, loss, clip_norm
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        size = sum(p.numel() * p.element_size() for p in self.parameters.values())
        self.at_once = max(1, bytes_max // max(1, _COPIES * size))
        """Rows whose gradients exist at once."""

    def clipped_sum(self, inputs: Any, targets: Any, rows: int) -> Gradients:
        """Return the sum of the clipped gradients of a batch, float64 by the parameter's name; of no rows zeros.

        Args:
            inputs: the inputs, with one row for each example in every tensor.
            targets: the targets, likewise.
            rows: the number of examples.

        Raises:
            NotRows: a tensor's first dimension is not `rows`.
        """
        total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.parameters.items()}
        for found in self.gradients(inputs, targets, rows):
            factors = clip_factors(found, self._clip_norm)
            for name, gradients in found.items():
                total[name] += torch.tensordot(factors.to(gradients.dtype), gradients, dims=1)
        return total

    def gradients(self, inputs: Any, targets: Any, rows: int) -> Iterator[Gradients]:
        """Yield the gradients of at most `at_once` rows after the other, (rows, *shape) by the parameter's name."""
        columns = columns_of((inputs, targets), rows)
        values = {name: p.detach() for name, p in self.parameters.items()}

        def loss_of(values: Mapping[str, torch.Tensor], row: tuple[torch.Tensor, ...]) -> torch.Tensor:
            batch = iter([column.unsqueeze(0) for column in row])
            of_row, target = map_tensors(lambda _: next(batch), (inputs, targets))
            return one_loss(self._loss(functional_call(self._model, dict(values), (of_row,)), target))

        of_rows = vmap(grad(loss_of), in_dims=(None, 0), randomness="different")
        for begin in range(0, rows, self.at_once):
            part = tuple(column[begin : begin + self.at_once] for column in columns)
            with warnings.catch_warnings():  # of operations that vmap calls row by row, such as recurrent layers
                warnings.filterwarnings("ignore", message=".*batching rule.*", category=UserWarning)
                found = of_rows(values, part)
            yield {name: each.detach() for name, each in found.items()}


def clip_factors(gradients: Gradients, clip_norm: float) -> torch.Tensor:
    """Return min(1, C / norm) of each row's whole gradient; rows that are not finite are set to 0, in place.

    Args:
        gradients: of rows, (rows, *shape) by the parameter's name.
        clip_norm: C.
    """
    norms = torch.stack([_norms(each) for each in gradients.values()])
    norm = torch.linalg.vector_norm(norms.double(), dim=0)
    if not bool(norm.isfinite().all()):
        bad = ~norm.isfinite()
        for each in gradients.values():
            each[bad] = 0
        norm = norm.masked_fill(bad, 0.0)
    return factors_of(norm, clip_norm)


def factors_of(norms: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """Return min(1, C / norm) of each norm, with `SLACK`; of a gradient of zero 1."""
    return (clip_norm / (norms * (1.0 + SLACK)).clamp(min=clip_norm)).clamp(max=1.0)


def columns_of(batch: Any, rows: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a batch, each with one row for an example.

    Raises:
        NotRows: a tensor has another first dimension.
    """
    found = tuple(tensors(batch))
    for tensor in found:
        if tensor.dim() == 0 or len(tensor) != rows:
            shape = tuple(tensor.shape)
            raise NotRows(
                f"a batch of {count_of(rows, 'row')} has a tensor of shape {shape}, whose first dimension is no row"
            )
    return found


def _norms(gradients: torch.Tensor) -> torch.Tensor:
    flat = gradients.flatten(1) if gradients.dim() > 1 else gradients.unsqueeze(1)
    norms: torch.Tensor = torch.linalg.vector_norm(flat, dim=1)
    return norms

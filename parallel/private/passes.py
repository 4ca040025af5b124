"""The passes of a private step: the noised sum of clipped example gradients, over the expected number of examples.

    (sum_i g_i min(1, C / ||g_i||) + N(0, (z C)^2)) / (q N)

The divisor is the expected batch q N, never the actual one, which depends on the sample; an empty sample is a step on
noise alone. Weight decay and the optimizer come after it. The loss of the rows is not returned: it would be a release
without noise.

Source: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.parallel.data.batch import Batch
from atoll.parallel.engine.passes import Observe, Total
from atoll.parallel.engine.step import Executor
from atoll.training.private.checks import Engine
from atoll.training.private.example_gradients import Gradients
from atoll.training.private.noise import Box, add_noise
from atoll.training.private.noised_gradients import sum_in_passes


class Sums(Protocol):
    """The clipped sums of global batches, of which each rank gets what it holds."""

    parameters: dict[str, nn.Parameter]
    boxes: dict[str, Box]
    """What this rank holds of each parameter; without a name: all of it."""

    def of_batch(self, batch: Batch) -> Gradients:
        """Return the sum of the clipped gradients of the global batch, float64, of which `batch` is this rank's."""


class SumsOfOne:
    """The clipped sums of one process without a mesh.

    Args:
        gradients: the clipped sums of rows.
        passes: least number of passes of a batch.
        at_once: most rows of one pass.
    """

    def __init__(self, gradients: Engine, *, at_once: int, passes: int = 1) -> None:
        self._gradients, self._at_once, self._passes = gradients, at_once, passes
        self.parameters, self.boxes = gradients.parameters, dict[str, Box]()

    def of_batch(self, batch: Batch) -> Gradients:
        """Return the clipped sum of a batch."""
        rows = 0 if batch.is_filler else batch.num_rows
        size = rows_of_pass(rows, max(self._passes, -(-rows // self._at_once)))
        return sum_in_passes(self._gradients, batch.inputs, batch.targets, rows, size)


class PrivatePasses:
    """The passes of a model; an `engine.step.Executor`.

    Args:
        evaluations: the passes that evaluate.
        sums: the clipped sums of example gradients.
        key: 32 bytes, secret, of this training and all of its ranks.
        std: standard deviation of the noise of a sum.
        expected: q N, the expected number of examples.
        device: the device of this rank.
    """

    def __init__(
        self,
        evaluations: Executor,
        sums: Sums,
        *,
        key: bytes,
        std: float,
        expected: float,
        device: torch.device | str = "cpu",
    ) -> None:
        self._evaluations, self._sums = evaluations, sums
        self.key = key
        self._std, self._expected, self._device = std, expected, device
        self.step = 0
        """The number of the next step."""

    def train(self, batch: Batch, total: Total, after_first: Callable[[float], None] | None = None) -> torch.Tensor:
        """Set the parameters' gradients, each rank's the same or its part; return zero in place of the loss."""
        sums = self._sums.of_batch(batch)
        add_noise(sums, self.key, self.step, self._std, self._sums.boxes)
        self.step += 1
        for name, parameter in self._sums.parameters.items():
            parameter.grad = _like(parameter, (sums[name] / self._expected).to(parameter.dtype))
        return torch.zeros((), device=self._device)

    def evaluate(self, batch: Batch, observe: Observe) -> None:
        """Call `observe` with outputs and targets of a batch of data that is not protected."""
        self._evaluations.evaluate(batch, observe)


def rows_of_pass(rows: int, passes: int) -> int:
    """Return the rows of each pass but the last, at least 1."""
    return max(1, -(-rows // max(1, passes)))


def _like(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient of what this rank holds in the placement of its parameter."""
    if not isinstance(parameter, DTensor):
        return gradient
    found: torch.Tensor = DTensor.from_local(
        gradient,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return found

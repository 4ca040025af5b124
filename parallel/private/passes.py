"""The passes of a private step: the noised sum of clipped example gradients, over the expected number of examples.

    (sum_i g_i min(1, C / ||g_i||) + N(0, (z C)^2)) / (q N)

The divisor is the expected batch q N, never the actual one, which depends on the sample; an empty sample is a step on
noise alone. Weight decay and the optimizer come after it. The loss of the rows is not returned: it would be a release
without noise.

Source: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1.
"""

from collections.abc import Callable
from typing import Any

import torch

from atoll.parallel.data.batch import Batch, map_tensors
from atoll.parallel.engine.passes import Observe, Total
from atoll.parallel.engine.step import Executor
from atoll.training.private.checks import Engine
from atoll.training.private.noise import add_noise


class PrivatePasses:
    """The passes of a model in one process; an `engine.step.Executor`.

    Args:
        evaluations: the passes that evaluate.
        gradients: the clipped sums of example gradients.
        key: 32 bytes, secret, of this process alone.
        std: standard deviation of the noise of a sum.
        expected: q N, the expected number of examples.
        at_once: most rows of one pass; None: all rows of a batch.
    """

    def __init__(
        self,
        evaluations: Executor,
        gradients: Engine,
        *,
        key: bytes,
        std: float,
        expected: float,
        at_once: int | None = None,
    ) -> None:
        self._evaluations, self._gradients = evaluations, gradients
        self._key, self._std, self._expected, self._at_once = key, std, expected, at_once
        self.step = 0
        """The number of the next step."""

    def train(self, batch: Batch, total: Total, after_first: Callable[[float], None] | None = None) -> torch.Tensor:
        """Set the parameters' gradients; return zero in place of the loss."""
        sums = self._clipped(batch)
        add_noise(sums, self._key, self.step, self._std)
        self.step += 1
        for name, parameter in self._gradients.parameters.items():
            parameter.grad = (sums[name] / self._expected).to(parameter.dtype)
        return torch.zeros(())

    def _clipped(self, batch: Batch) -> dict[str, torch.Tensor]:
        rows = 0 if batch.is_filler else batch.num_rows
        size = max(1, rows if self._at_once is None else self._at_once)
        sums = self._gradients.clipped_sum(*_part(batch, 0, min(size, rows)), min(size, rows))
        for begin in range(size, rows, size):
            end = min(rows, begin + size)
            for name, found in self._gradients.clipped_sum(*_part(batch, begin, end), end - begin).items():
                sums[name] += found
        return sums

    def evaluate(self, batch: Batch, observe: Observe) -> None:
        """Call `observe` with outputs and targets of a batch of data that is not protected."""
        self._evaluations.evaluate(batch, observe)


def _part(batch: Batch, begin: int, end: int) -> tuple[Any, Any]:
    inputs, targets = map_tensors(lambda tensor: tensor[begin:end], (batch.inputs, batch.targets))
    return inputs, targets

"""The gradient of a private step: the noised sum of clipped example gradients, over the expected number of examples.

    (sum_i g_i min(1, C / ||g_i||) + N(0, (z C)^2)) / (q N)

The divisor is the expected batch q N, never the actual one, which depends on the sample; an empty sample is a step on
noise alone. There is one noise for each step, however many passes its rows take. The proximal term, weight decay and
the optimizer come after it. The loss of the rows is not returned: it would be a release without noise.

Source: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1.
"""

from typing import Any

from atoll.training.data.trees import map_tensors
from atoll.training.private.checks import Engine
from atoll.training.private.example_gradients import Gradients
from atoll.training.private.noise import add_noise

ROWS_AT_ONCE = 256
"""Most rows of one pass of a task without a batch size."""


class NoisedGradients:
    """The gradients of a model's private steps, in one process.

    Args:
        gradients: the clipped sums of example gradients.
        key: 32 bytes, secret, of one training.
        std: standard deviation of the noise of a sum, z C; 0: the clients add it to the sum of their updates.
        expected: q N, the expected number of examples; with noise by the clients the batch of the run.
        at_once: most rows of one pass; None: all rows of a batch.
    """

    def __init__(
        self, gradients: Engine, *, key: bytes, std: float, expected: float, at_once: int | None = None
    ) -> None:
        self._gradients = gradients
        self._key, self._std, self._expected, self._at_once = key, std, expected, at_once
        self.step = 0
        """The number of the next step."""

    def set(self, inputs: Any, targets: Any, rows: int) -> None:
        """Set the parameters' gradients for the next step.

        Args:
            inputs: of a batch; without rows of the sample a filler.
            targets: of the batch.
            rows: the number of examples of the sample, perhaps 0.
        """
        size = max(1, rows if self._at_once is None else self._at_once)
        sums = sum_in_passes(self._gradients, inputs, targets, rows, size)
        if self._std:  # else the clients add it to the sum of their updates
            add_noise(sums, self._key, self.step, self._std)
        self.step += 1
        for name, parameter in self._gradients.parameters.items():
            parameter.grad = (sums[name] / self._expected).to(parameter.dtype)


def sum_in_passes(gradients: Engine, inputs: Any, targets: Any, rows: int, size: int) -> Gradients:
    """Return the sum of the clipped gradients of a batch, float64 by the parameter's name.

    Args:
        gradients: the clipped sums of rows.
        inputs: of the batch; without rows a filler.
        targets: of the batch.
        rows: the number of examples that count, perhaps 0.
        size: most rows of one pass, at least 1.
    """
    first = min(size, rows)
    sums = gradients.clipped_sum(*part_of(inputs, targets, 0, first), first)
    for begin in range(size, rows, size):
        end = min(rows, begin + size)
        for name, found in gradients.clipped_sum(*part_of(inputs, targets, begin, end), end - begin).items():
            sums[name] += found
    return sums


def part_of(inputs: Any, targets: Any, begin: int, end: int) -> tuple[Any, Any]:
    """Return the inputs and targets of some rows."""
    part_of_inputs, part_of_targets = map_tensors(lambda tensor: tensor[begin:end], (inputs, targets))
    return part_of_inputs, part_of_targets

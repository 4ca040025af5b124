"""The passes of a private step (`training.private.noised_gradients`), with the interface of the engine's passes."""

from collections.abc import Callable

import torch

from atoll.parallel.data.batch import Batch
from atoll.parallel.engine.passes import Observe, Total
from atoll.parallel.engine.step import Executor
from atoll.training.private.checks import Engine
from atoll.training.private.noised_gradients import NoisedGradients


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
        self._evaluations = evaluations
        self._noised = NoisedGradients(gradients, key=key, std=std, expected=expected, at_once=at_once)

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._noised.step

    @step.setter
    def step(self, number: int) -> None:
        self._noised.step = number

    def train(self, batch: Batch, total: Total, after_first: Callable[[float], None] | None = None) -> torch.Tensor:
        """Set the parameters' gradients; return zero in place of the loss."""
        self._noised.set(batch.inputs, batch.targets, 0 if batch.is_filler else batch.num_rows)
        return torch.zeros(())

    def evaluate(self, batch: Batch, observe: Observe) -> None:
        """Call `observe` with outputs and targets of a batch of data that is not protected."""
        self._evaluations.evaluate(batch, observe)

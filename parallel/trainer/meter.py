"""The speed of a training, its memory, and its remaining time."""

import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from atoll.parallel.data.batch import Batch

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Unit of the system's resident set size [bytes]."""


class Meter:
    """A stopwatch of the steps, without the time between them.

    Args:
        clock: returns the present instant [s], monotonic.
        steps: the number of steps of the whole training.
        device: the device of this rank.
        flops: the floating-point operations of one example, forward and backward; None if unknown.
        peak: FLOP/s of all ranks together; None if unknown.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        steps: int,
        device: torch.device,
        flops: float | None = None,
        peak: float | None = None,
    ) -> None:
        self._clock, self._steps, self._device = clock, steps, device
        self._use = None if flops is None or peak is None else flops / peak
        self._began = self._resumed = clock()
        self._before = 0.0
        self._examples = self._done = 0
        self._tokens: int | None = None

    @property
    def seconds(self) -> float:
        """Duration of the training so far, including earlier processes [s]."""
        return self._before + self._clock() - self._began

    def step(self, batch: Batch, examples: int) -> None:
        """Count one more step with this number of examples on all ranks; the first batch has an example's tokens."""
        if self._done == 0:
            self._tokens = tokens_of(batch)
        self._examples += examples
        self._done += 1

    def resume(self) -> None:
        """Restart the steps' time, after other work such as an evaluation."""
        self._resumed, self._examples = self._clock(), 0

    def read(self, step: int) -> dict[str, float]:
        """Return the measurements since the last reading.

        Args:
            step: the number of steps done in the training.
        """
        now = self._clock()
        rate = self._examples / max(now - self._resumed, 1e-9)
        found: dict[str, float] = {"examples_per_s": rate}
        if self._tokens is not None:
            found["tokens_per_s"] = rate * self._tokens
        if self._use is not None:
            found["mfu"] = rate * self._use
        found["memory_bytes"] = self._memory()
        found["seconds"] = self.seconds
        found["seconds_left"] = (now - self._began) / max(self._done, 1) * (self._steps - step)
        self.resume()
        return found

    def _memory(self) -> int:
        """Return the peak memory of this rank: of the GPU, or of the process."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"seconds": self.seconds}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._before, self._began = state["seconds"], self._clock()
        self.resume()


def tokens_of(batch: Batch) -> int | None:
    """Return the tokens of one example, if targets are sequences of integers (B, S); else None."""
    targets = batch.targets
    if isinstance(targets, torch.Tensor) and targets.ndim == 2 and not targets.is_floating_point():
        return int(targets.shape[1])
    return None

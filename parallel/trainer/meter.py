"""How fast a training is, how much memory it takes, and how long it still needs."""

import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from atoll.parallel.data.batch import Batch

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in which the system counts a resident set."""


class Meter:
    """Takes the time of the steps, without what lies between them.

    Args:
        clock: the present instant [s], monotonic.
        steps: of the whole training.
        device: of this rank.
        flops: of one example, forward and backward; None when not known.
        peak: FLOP/s of all ranks together; None when not known.
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
        """Of the training so far, those of earlier processes included [s]."""
        return self._before + self._clock() - self._began

    def step(self, batch: Batch, examples: int) -> None:
        """One more step, of so many examples on all ranks; the first batch says how many tokens each has."""
        if self._done == 0:
            self._tokens = tokens_of(batch)
        self._examples += examples
        self._done += 1

    def resume(self) -> None:
        """Something else has ended, such as an evaluation: the steps' time goes on from here."""
        self._resumed, self._examples = self._clock(), 0

    def read(self, step: int) -> dict[str, float]:
        """Since the last reading.

        Args:
            step: how many steps of the training are done.
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
        """The most that this rank has held: on the GPU, or of the process."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"seconds": self.seconds}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._before, self._began = state["seconds"], self._clock()
        self.resume()


def tokens_of(batch: Batch) -> int | None:
    """Tokens of one example, where targets are sequences of integers (B, S); else None."""
    targets = batch.targets
    if isinstance(targets, torch.Tensor) and targets.ndim == 2 and not targets.is_floating_point():
        return int(targets.shape[1])
    return None

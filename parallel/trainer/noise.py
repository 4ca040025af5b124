"""The gradient noise scale while a training goes on: about the batch size beyond which larger batches pay little."""

from collections.abc import Mapping
from typing import Any

from atoll.parallel.engine.step import NoiseSample
from atoll.parallel.optimizers.noise_scale import NoiseScale, estimate

DECAY = 0.95
"""Looks back over about twenty measurements."""


class NoiseMeter:
    """Averages what single steps show (see `optimizers.noise_scale`).

    Args:
        every: steps between two measurements; None: it never measures.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._scale = NoiseScale(DECAY)

    def is_due(self, step: int) -> bool:
        """Whether the step of this number (from 1) is to be measured."""
        return self._every is not None and step % self._every == 0

    def see(self, sample: NoiseSample | None) -> None:
        """Take in a measurement; None: the batch was too small to be split."""
        if sample is not None:
            self._scale.add(
                estimate(
                    small_batch=sample.small_units,
                    small_squared=float(sample.small_square),
                    big_batch=sample.big_units,
                    big_squared=float(sample.big_square),
                )
            )

    def read(self) -> dict[str, float]:
        """The noise scale in units of the loss, where there is a sensible one yet."""
        simple = self._scale.simple
        return {} if simple is None else {"noise_scale": simple}

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self._scale.state_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._scale.load_state_dict(state)

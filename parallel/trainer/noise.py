"""The gradient noise scale during a training: about the batch size beyond which larger batches pay little."""

from collections.abc import Mapping
from typing import Any

from atoll.parallel.engine.step import NoiseSample
from atoll.training.optimizers.noise_scale import NoiseScale, estimate

DECAY = 0.95
"""The decay of the means: they look back over about twenty measurements."""


class NoiseMeter:
    """Means of the noise samples of single steps (see `optimizers.noise_scale`).

    Args:
        every: steps between two measurements; None: it never measures.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._scale = NoiseScale(DECAY)

    def is_due(self, step: int) -> bool:
        """Return whether the noise is measured in the step of this number (from 1)."""
        return self._every is not None and step % self._every == 0

    def see(self, sample: NoiseSample | None) -> None:
        """Add a noise sample to the means; None: the batch was too small to be split."""
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
        """Return the noise scale in units of the loss; empty until its estimate is positive."""
        simple = self._scale.simple
        return {} if simple is None else {"noise_scale": simple}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self._scale.state_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._scale.load_state_dict(state)

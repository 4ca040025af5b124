"""Feature skew: each client changes its inputs in a fixed way, the same for its training and its test data."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from atoll.simulations.populations.partitions import stream
from atoll.training.data.draws import drawing

STRENGTH = 0.1
"""Default strength of a change, in units of the inputs."""


class NotChangeable(ValueError):
    """Error: the change does not apply to inputs of this kind."""


@dataclass(frozen=True, slots=True)
class FeatureSkew:
    """Change that each of `num_clients` clients applies to the inputs x of its examples.

        noise:     x + s (k + 1) / K z,       z ~ N(0, 1) for each element, drawn once
        shift:     exp(s a_k) x + s b_k,      a_k, b_k ~ N(0, 1)
        rotation:  x turned by 90° (k mod 4) in its last two dimensions

    Source:
        noise: Li et al., "Federated Learning on Non-IID Data Silos" (NIID-Bench), ICDE 2022, noise-based feature
        imbalance. rotation: Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020,
        rotated MNIST with four clusters. shift: ours, the scanners of `examples/scanners.py`.
    """

    change: Literal["noise", "shift", "rotation"]
    num_clients: int
    seed: int
    strength: float = STRENGTH

    def of(self, client: int, split: str, dataset: Any) -> TensorDataset:
        """Return the client's examples with changed inputs, in memory.

        Args:
            client: the number of the client, from 0.
            split: "train" or "test", each with separate noise.
            dataset: the client's unchanged examples.

        Raises:
            NotChangeable: the inputs are not one tensor of floats, or not square images for a rotation.
        """
        inputs, targets = drawing(dataset, client)(0, torch.arange(len(dataset)))
        if not isinstance(inputs, torch.Tensor) or not inputs.is_floating_point():
            kind = inputs.dtype if isinstance(inputs, torch.Tensor) else type(inputs).__name__
            raise NotChangeable(f"feature skew needs inputs that are one tensor of floats, and they are {kind}")
        return TensorDataset(self._changed(client, split, inputs), targets)

    def _changed(self, client: int, split: str, inputs: torch.Tensor) -> torch.Tensor:
        if self.change == "rotation":
            if inputs.ndim < 3 or inputs.shape[-1] != inputs.shape[-2]:
                raise NotChangeable(
                    f"rotation needs square images, and inputs have the shape {tuple(inputs.shape[1:])}"
                )
            return torch.rot90(inputs, client % 4, (-2, -1))
        if self.change == "shift":
            scale, offset = self._scale_and_offset(client)
            return scale * inputs + offset
        noise = stream(self.seed, "noise", client, split).standard_normal(tuple(inputs.shape), np.float32)
        return inputs + self._level(client) * torch.from_numpy(noise).to(inputs.dtype)

    def description(self, client: int) -> str:
        """Describe the change of a client in words, such as "rotated by 90°"."""
        if self.change == "rotation":
            return f"rotated by {90 * (client % 4)}°"
        if self.change == "noise":
            return f"noise {self._level(client):.3g}"
        scale, offset = self._scale_and_offset(client)
        return f"x {scale:.3g} {offset:+.3g}"

    def _level(self, client: int) -> float:
        return self.strength * (client + 1) / self.num_clients

    def _scale_and_offset(self, client: int) -> tuple[float, float]:
        a, b = stream(self.seed, "shift", client).standard_normal(2)
        return float(np.exp(self.strength * a)), float(self.strength * b)

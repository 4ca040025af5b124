"""Poisoned data: the same data set with other labels, or with a trigger on some of its inputs.

    label flip    (x, y) -> (x, L - 1 - y)                               L labels; all examples
    backdoor      (x, y) -> (x with the trigger, target)                 a share of the examples, drawn by seed

The trigger is a patch of constant value: the last `size` elements of the last axis of a flat input, or of the last two
axes of an input that has more. Negative labels (ignored tokens) stay unchanged.

Source: Fang et al., "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning", USENIX Security 2020,
Section 4.1 (label flip); Gu et al., "BadNets", 2017 (the patch in the corner).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset, TensorDataset

from atoll.ground.printable import count_of
from atoll.protocol.settings import ConfigError, or_faults
from atoll.training.data.batches import fetcher

Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function from a batch (inputs, targets) to the adversary's version of it; it does not modify its arguments."""


@dataclass(frozen=True, slots=True)
class Flip:
    """Label flip: each label becomes its mirror image among `num_labels`."""

    num_labels: int

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Flip the labels of a batch; raise ConfigError for targets that are not labels below `num_labels`."""
        check_labels(targets, "label_flip")
        if targets.numel() and (largest := int(targets.max())) >= self.num_labels:
            allowed = f"allowed: integer >= {largest + 1}, because the data has a label {largest}"
            raise ConfigError([f"attack.num_labels: got {self.num_labels}; {allowed}"])
        return inputs, torch.where(targets < 0, targets, self.num_labels - 1 - targets)


@dataclass(frozen=True, slots=True)
class Stamp:
    """Backdoor: each input gets the trigger, each label becomes the target."""

    target: int
    size: int
    value: float

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stamp a batch; raise ConfigError as `check` does."""
        self.check(inputs, targets)
        stamped = inputs.clone()
        patch = (..., slice(-self.size, None), slice(-self.size, None))
        stamped[patch if inputs.ndim > 2 else patch[:2]] = self.value
        return stamped, torch.where(targets < 0, targets, self.target)

    def check(self, inputs: object, targets: object) -> None:
        """Check that a batch can be stamped.

        Raises:
            ConfigError: the inputs are not a tensor or smaller than the patch, or the targets are not labels; with all
                faults.
        """
        faults: list[str] = []
        or_faults(lambda: self._check_inputs(inputs), faults)
        or_faults(lambda: check_labels(targets, "backdoor"), faults)
        if faults:
            raise ConfigError(faults)

    def _check_inputs(self, inputs: object) -> None:
        if not isinstance(inputs, torch.Tensor) or inputs.ndim < 2:
            raise ConfigError([f"attack.kind: backdoor needs inputs of one axis or more, got {_kind(inputs)}"])
        sides = inputs.shape[1:][-2:]
        if self.size > min(sides):
            what = (
                f"images of {sides[0]} x {sides[1]}" if len(sides) > 1 else f"inputs of {count_of(sides[0], 'place')}"
            )
            raise ConfigError([f"attack.trigger_size: got {self.size}; allowed: 1 to {min(sides)}, for {what}"])


class Poisoned(Dataset[Any]):
    """A data set that changes the chosen examples as they are read."""

    def __init__(self, dataset: Any, change: Change, chosen: NDArray[np.bool_]) -> None:
        self._dataset, self._change, self._chosen = dataset, change, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = fetcher(self._dataset)(torch.tensor([index]))
        if self._chosen[index]:
            inputs, targets = self._change(inputs, targets)
        return inputs[0], targets[0]


def poisoned(dataset: Any, change: Change, chosen: NDArray[np.bool_] | None = None) -> Any:
    """Return the data set with the chosen examples changed (None: all); tensors stay tensors, which read fast."""
    if chosen is None:
        chosen = np.ones(len(dataset), bool)
    if not _is_tensors(dataset):
        return Poisoned(dataset, change, chosen)
    inputs, targets = everything(dataset)
    where = torch.from_numpy(np.flatnonzero(chosen))
    new_inputs, new_targets = change(inputs[where], targets[where])
    return TensorDataset(_put(inputs, where, new_inputs), _put(targets, where, new_targets))


def everything(dataset: Any) -> tuple[Any, torch.Tensor]:
    """Return all inputs and all targets, each as one batch."""
    inputs, targets = fetcher(dataset)(torch.arange(len(dataset)))
    return inputs, targets


def first(dataset: Any) -> tuple[Any, Any]:
    """Return the first example as a batch of one."""
    inputs, targets = fetcher(dataset)(torch.arange(1))
    return inputs, targets


def check_labels(targets: object, attack: str) -> None:
    """Check that targets are labels.

    Raises:
        ConfigError: the targets are not a tensor of integers.
    """
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point():
        raise ConfigError([f"attack.kind: {attack} needs labels (integers) as targets, got {_kind(targets)}"])


def _put(tensor: torch.Tensor, where: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[where] = new
    return changed


def _is_tensors(dataset: Any) -> bool:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and len(dataset.tensors) == 2


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__

"""The outcome of a training on one rank."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Answer:
    """A word, and what was measured."""

    word: str
    """done, refused or failed."""
    text: str = ""
    losses: tuple[float, ...] = ()
    state: dict[str, np.ndarray[Any, Any]] | None = None

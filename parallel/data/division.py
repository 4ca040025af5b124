"""The named divisions of the examples over data-parallel ranks, which settings are read with, without numpy."""

from typing import Literal

Sampling = Literal["global", "partition"]
Last = Literal["uneven", "drop", "wrap"]

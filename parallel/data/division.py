"""The names of the divisions of examples over data-parallel ranks, for settings that are read without numpy."""

from typing import Literal

Sampling = Literal["global", "partition"]
Last = Literal["uneven", "drop", "wrap"]

"""The execution of a fold: threads, tiles, device. No choice among them changes a bit of the result."""

from collections.abc import Callable
from dataclasses import dataclass

from atoll.aggregation.fold.device import Device


@dataclass(frozen=True, slots=True)
class Execution:
    """The resources of a fold, and its hook between tiles."""

    threads: int = 1
    """The number of tiles that are computed concurrently; the caller's thread exchanges and writes meanwhile."""
    tile_elements: int | None = None
    """The number of elements that one thread finishes at once, the same at each rank; None: `TILE_ELEMENTS`
    of the fold, or of the device."""
    between: Callable[[], None] | None = None
    """The function that is called before each tile is written; its exception ends the fold, and no file appears."""
    device: Device | None = None
    """The device on which float updates are summed, unless a rule reads them; None: the CPU, by numpy or numba."""

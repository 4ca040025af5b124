"""The disk space that the uploads of a run may take."""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from atoll.ground.printable import count_of
from atoll.server.errors import OperatorError

logger = logging.getLogger(__name__)


FREE_MIN = 64 << 20
"""Default of `coordinator.disk_free_min` [bytes]."""


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Limits of the disk space for uploads [bytes]."""

    free_min: int = FREE_MIN
    """Space that uploads leave free, so that the journal can record that the disk is full."""
    incoming_max: int = 0
    """Largest space for a run's uploads that are not accepted yet, reserved space included; 0: no limit."""

    def has_room(self, folder: Path, num_bytes: int) -> bool:
        """Return whether there is room for `num_bytes` more bytes beside the space that stays free."""
        return shutil.disk_usage(folder).free >= num_bytes + self.free_min


def check_free_min(state: Path, free_min: int) -> None:
    """Check that the disk of a state directory, which may not exist yet, could ever have the space that stays free.

    If it could, but has less now, it logs this.

    Args:
        state: the state directory.
        free_min: `coordinator.disk_free_min` [bytes].

    Raises:
        OperatorError: the disk is not larger than that space, so that no update would ever be accepted.
    """
    folder = next(path for path in (state.absolute(), *state.absolute().parents) if path.exists())
    disk = shutil.disk_usage(folder)
    if free_min >= disk.total and free_min != FREE_MIN:  # a disk smaller than the default counts as full
        raise OperatorError(
            f"coordinator.disk_free_min: got {free_min}; the disk of {state} has {count_of(disk.total, 'byte')} "
            f"in total, so no update would ever be accepted; allowed: less, such as {FREE_MIN} (64 MiB), which is the "
            "default, or a state directory on a larger disk (--state)"
        )
    if free_min > disk.free:
        logger.warning(
            "the disk of %s has %s free, and coordinator.disk_free_min keeps %d free: uploads wait until there is room",
            state,
            count_of(disk.free, "byte"),
            free_min,
        )

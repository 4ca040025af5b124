"""The disk space that the uploads of a run may take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """The limits of the disk space for uploads [bytes]."""

    free_min: int = 64 << 20
    """Space that uploads leave free, so that the journal can record that the disk is full."""
    incoming_max: int = 0
    """Most space for a run's uploads that are not accepted yet, reserved space included; 0: no limit."""

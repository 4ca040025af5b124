"""The disk space that the uploads of a run may take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """What uploads may take of a disk [bytes]."""

    free_min: int = 64 << 20
    """They must leave so much: the journal has to be able to say that the disk is full."""
    incoming_max: int = 0
    """Uploads of one run that are not accepted yet, with what is promised to open ones; 0: no limit."""

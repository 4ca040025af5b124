"""The record of the true clock in the state directory, renewed while the coordinator runs.

clock.json    the last reading of the true clock, the newest signed instant, and the messages about clocks that views
              show; overwritten in place, so that this needs no disk space, and not synced. It is specific to one
              machine, and not part of a backup
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll.server.clock import Reading

FILE = "clock.json"
NUM_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ClockNote:
    """Content of the record."""

    reading: Reading
    """The last reading of the true clock."""
    signed: float = 0.0
    """The newest signed instant [s since the epoch]."""
    told: list[str] = field(default_factory=list)
    """Messages about clocks that differ now."""

    def write(self, folder: Path) -> None:
        """Write the record to a state directory.

        Raises:
            OSError: it cannot be written.
        """
        content = json.dumps({**asdict(self.reading), "signed": self.signed, "told": self.told}).encode()
        if len(content) > NUM_BYTES:
            content = json.dumps({**asdict(self.reading), "signed": self.signed, "told": self.told[:1]}).encode()
        file = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(file, content.ljust(NUM_BYTES), 0)
        finally:
            os.close(file)

    @classmethod
    def read(cls, folder: Path) -> "ClockNote | None":
        """Return the record of a state directory; None: missing or unreadable."""
        try:
            found: dict[str, Any] = json.loads((folder / FILE).read_text())
            reading = Reading(float(found["true"]), float(found["uptime"]), str(found["boot"]))
            return cls(reading, float(found["signed"]), [str(sentence) for sentence in found["told"]])
        except (OSError, ValueError, KeyError, TypeError):
            return None

"""The settings of a crew's ranks, which the agent writes to `ranks.json` before any rank starts. Without torch."""

import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TERMS = "ranks.json"
RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The settings of a rank before its first order."""

    device: str = "cpu"
    """`cpu`, `cuda`, or `auto` for a GPU where there is one."""
    collective_timeout: float = 120.0
    """Longest wait of a collective for the slowest rank [s]: a hung rank is noticed then."""
    log: str
    """Path of a log without its ending; rank N appends to `LOG.rankN.log`."""

    def write(self, folder: Path) -> None:
        """Write the settings into the crew's folder; complete or not at all."""
        part = folder / f"{TERMS}.part"
        part.write_text(json.dumps(asdict(self)), "utf-8")
        os.replace(part, folder / TERMS)

    @classmethod
    def read(cls, folder: Path, timeout_s: float) -> "Terms":
        """Wait for the settings in the crew's folder, and return them: a rank may start before the agent.

        Raises:
            TimeoutError: there are no settings in time.
        """
        until, pause = time.monotonic() + timeout_s, threading.Event()
        while True:
            try:
                return cls(**json.loads((folder / TERMS).read_text("utf-8")))
            except FileNotFoundError:
                if time.monotonic() >= until:
                    raise TimeoutError(
                        f"no agent has written {folder / TERMS}: is this the folder of the agent?"
                    ) from None
            pause.wait(RETRY_S)

    def log_of(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return Path(f"{self.log}.rank{rank}.log")

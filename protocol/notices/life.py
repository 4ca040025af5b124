"""The life of a process that holds a state directory: the next start reports if it ended without a clean exit."""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

RUNNING, RUNNING_S = "running", 2.0
"""File of a state directory that exists while its process runs, and the interval of its renewal [s]."""


class Life:
    """Life of the process that holds a state directory, from here to `close`; it knows how the previous process ended.

    Args:
        folder: the directory, locked. If it cannot be written, the next start reports nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._mark, self._is_over = folder / RUNNING, threading.Event()
        self._last: float | None = None
        with suppress(OSError):
            self._last = self._mark.stat().st_mtime
        self._renewing = threading.Thread(target=self._renew, name="life", daemon=True)
        self._renewing.start()

    def tell(self, recovered: str = "") -> None:
        """Log that the previous process ended without a clean exit, if so: it was killed, or its machine went down.

        Args:
            recovered: what was recovered from that process; empty: nothing.
        """
        if self._last is not None:
            what = "the last process ended without a clean exit: it was killed, or its machine went down"
            more = f"; recovered: {recovered}" if recovered else ""
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._last))
            logger.warning("%s. It was last alive at %s%s", what, at, more)

    def close(self) -> None:
        """Record a clean exit: the next start reports nothing."""
        self._is_over.set()
        self._renewing.join()
        with suppress(OSError):
            self._mark.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._is_over.is_set():
            with suppress(OSError):
                self._mark.touch()
            if self._is_over.wait(RUNNING_S):
                break

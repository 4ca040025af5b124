"""The verification of a log while it is written, a few lines at a time: a change is found within minutes."""

import logging
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from atoll.ground.printable import count_of
from atoll.protocol.audit.chain import Verifier
from atoll.protocol.audit.files import audit_folder, log_files
from atoll.server.audit.reading import Source, verify

logger = logging.getLogger(__name__)

LINES = 300
"""Lines of one step, which takes some milliseconds."""

REST_S = 60.0
"""Shortest pause between two passes [s]; a pause is at least as long as the previous pass."""


class ChainWatch:
    """Verifier that runs over a coordinator's log in passes. Call `step` repeatedly, on a thread; one call at a time.

    Args:
        state: the state directory.
    """

    def __init__(self, state: Path) -> None:
        self._state, self._begun, self._next = state, 0.0, 0.0
        self._lines: Iterator[tuple[str, bytes]] | None = None
        self._verifier, self._files = Verifier(), [Path()]
        self.fault = ""
        """Description of a broken chain, found by the newest complete pass; empty: none."""

    def step(self) -> None:
        """Verify the next lines. A pass that was overtaken by a rotation or an archive is discarded."""
        try:
            if self._lines is None and not self._begin():
                return
            assert self._lines is not None
            found = [self._verifier.feed(line, where) for where, line in islice(self._lines, LINES)]
            if len(found) < LINES:
                self._lines = None
                self._conclude()
        except OSError as error:  # the log is being archived, or the disk does not respond
            logger.debug("the audit log cannot be verified now: %s", error)
            self._lines, self._next = None, time.monotonic() + REST_S

    def _begin(self) -> bool:
        self._begun = time.monotonic()
        if self._begun < self._next:
            return False
        source = Source.of_state(self._state)
        self._files = [path for path, _ in source.files]
        self._lines, self._verifier = source.lines(), Verifier(source.key, whole=source.is_whole)
        return True

    def _conclude(self) -> None:
        now = time.monotonic()
        self._next = now + max(REST_S, now - self._begun)
        if not self._verifier.finish():
            self.fault = ""
            return
        again = verify(Source.of_state(self._state))  # recheck at once: an archive may have moved lines meanwhile
        if self._files != log_files(audit_folder(self._state)):
            return
        fault = ""
        if again.faults:
            what = f"{again.faults[0]} ({count_of(again.num_faults, 'fault')} in total)"
            remedy = f"First copy the folder; then `atoll audit verify --state {self._state}` names the lines"
            fault = f"the audit log in {audit_folder(self._state)} is broken: {what}. {remedy}"
        if fault and fault != self.fault:
            logger.error("%s", fault)
        self.fault = fault

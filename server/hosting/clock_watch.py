"""The watch over the coordinator's clocks: the check at the start, jumps while it runs, and the clocks of its sites."""

import logging
import math
import time
from collections.abc import Callable

from atoll.ground.printable import count_of, span
from atoll.protocol.identity.clock_hint import SKEW_S, instant
from atoll.protocol.vocabulary import ClientId
from atoll.server.audit.actions import Action
from atoll.server.audit.log import AuditLog
from atoll.server.clock import ClockComparison, MonotoneClock, Reading, apart, fault_at_start, jumped
from atoll.server.errors import OperatorError
from atoll.server.journal.clock_note import ClockNote
from atoll.server.journal.state_directory import StateDirectory

logger = logging.getLogger(__name__)

AGAIN_S = 3600.0
"""Interval at which a persisting difference is logged again [s]."""
HEARD_S = 600.0
"""Time for which the clock of a refused site is remembered [s]."""


def check_clock(state: StateDirectory, *, accept: bool) -> str:
    """Compare the true clock with the last true time of the journal, before it is used to sign or issue anything.

    Args:
        state: the state directory, locked.
        accept: whether the operator confirms that the clock is right now.

    Returns:
        The difference that the operator has accepted; "": none.

    Raises:
        OperatorError: the two differ by minutes.
    """
    note, alive = ClockNote.read(state.path), state.last_alive()
    last = note.reading if note is not None else None if alive is None else Reading(alive)
    fault = "" if last is None else fault_at_start(last, Reading.take())
    if fault and not accept:
        raise OperatorError(fault)
    return fault


class ClockWatch:
    """Comparison of the clocks of a running coordinator, reported in its log, the audit log and the views.

    Args:
        state: the state directory.
        monotone: the clock of the deadlines.
        audit: the audit log.
        signed: returns the newest instant that was signed [s since the epoch].
    """

    def __init__(
        self, state: StateDirectory, monotone: MonotoneClock, audit: AuditLog, signed: Callable[[], float]
    ) -> None:
        self._folder, self._monotone, self._audit, self._signed = state.path, monotone, audit, signed
        self._comparison = ClockComparison(Reading.take())
        self._sites: dict[ClientId, tuple[float, float]] = {}  # how far ahead [s], and when it was reported
        self._logged_at: dict[str, float] = {}
        self.told: dict[str, str] = {}
        """Messages about clocks that differ now, by the clock: `journal`, `machine`, `site NAME`."""
        self.on_jump: list[Callable[[float], None]] = []
        """Functions that are called with the seconds of a jump."""
        self.on_told: list[Callable[[bool], None]] = []
        """Functions that are called with whether all clocks agree, when that changes."""

    def accepted(self, fault: str) -> None:
        """Record that the operator has accepted a difference at the start; "": none."""
        if fault:
            logger.warning("accepted by --accept-clock: %s", fault)
            self._audit.record(Action.CLOCK_ACCEPT, instant(time.time()), fault)

    def look(self) -> None:
        """Read the clocks, report changes since the last reading, and record the true time.

        Raises:
            OSError: the record cannot be written.
        """
        reading, jump = Reading.take(), ""
        if by := self._comparison.jump(reading):
            self._sites = {name: (ahead - by, at) for name, (ahead, at) in self._sites.items()}
            jump = jumped(by, reading.true)
            self._audit.record(Action.CLOCK_JUMP, f"{by:+.1f} s", jump)
        self._tell(reading, jump)
        if by:
            for listener in self.on_jump:
                listener(by)
        ClockNote(reading, self._signed(), [*self.told.values()]).write(self._folder)

    # ------------------------------------------------------------ sites

    def refusal(self, client_id: ClientId, ahead: float | None) -> str:
        """Return the reason to refuse a site whose clock would reject every signed message, or "".

        Args:
            client_id: the site.
            ahead: its clock minus this machine's [s]; None: not stated.
        """
        if ahead is None:
            return ""
        self._sites[client_id] = ahead, time.monotonic()
        if abs(ahead) <= SKEW_S:
            return ""
        side, now = "ahead of" if ahead > 0 else "behind", time.time()
        return (
            f"the clock of site {client_id} shows {instant(now + ahead)}, {span(ahead)} {side} the coordinator's "
            f"clock, which shows {instant(now)}; allowed: {SKEW_S:.0f} s. Set the wrong one (NTP): the agent waits for "
            "it"
        )

    def forget(self, client_id: ClientId) -> None:
        """Forget the clock of a site that has left."""
        self._sites.pop(client_id, None)

    # ------------------------------------------------------------ words

    def _tell(self, reading: Reading, jump: str) -> None:
        """Log the changes; a jump and its consequences are one line."""
        sentence = apart(self._monotone.now(), reading.true)
        told = {**({"journal": sentence} if sentence else {}), **self._of_sites()}
        now = time.monotonic()
        due = [clock for clock in told if now - self._logged_at.get(clock, -math.inf) >= AGAIN_S]
        self._logged_at |= dict.fromkeys(due, now)
        lines = [told[clock] for clock in due]
        if jump:
            lines = ["; ".join([jump, *(told[clock] for clock in due if clock != "journal")])]
        for line in lines:
            logger.warning("%s", line)
        if self._logged_at.keys() - told.keys():
            self._logged_at = {clock: at for clock, at in self._logged_at.items() if clock in told}
            if not told:
                logger.info("the journal's clock, this machine's clock and the sites' clocks agree again")
        if bool(told) is not bool(self.told):
            for listener in self.on_told:
                listener(not told)
        self.told = told

    def _of_sites(self) -> dict[str, str]:
        """Return the messages about sites whose clocks differ; if most differ equally, about this machine's clock."""
        heard = time.monotonic() - HEARD_S
        self._sites = {
            name: (ahead, at) for name, (ahead, at) in self._sites.items() if at >= heard or abs(ahead) <= SKEW_S
        }
        by = {name: ahead for name, (ahead, _) in self._sites.items()}
        wrong = {name: ahead for name, ahead in by.items() if abs(ahead) > SKEW_S}
        for side in (1, -1):
            same = sorted(abs(ahead) for ahead in wrong.values() if ahead * side > 0)
            if len(same) >= 2 and len(same) * 2 > len(by):
                word = "ahead of" if side > 0 else "behind"
                middle, count = span(same[len(same) // 2]), f"{len(same)} of {count_of(len(by), 'site')}"
                told = f"the clocks of {count} are about {middle} {word} this machine's, which is probably wrong (NTP)"
                return {"machine": told}
        return {
            f"site {name}": f"the clock of site {name} is {span(ahead)} {'ahead of' if ahead > 0 else 'behind'} this "
            "machine's: the site is not connected until they agree; set the wrong one (NTP)"
            for name, ahead in sorted(wrong.items())
        }

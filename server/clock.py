"""The coordinator's two clocks, and their comparison. The monotone clock counts, the true one dates.

    monotone    deadlines, leases, the journal's order: never runs backward, not moved by a jump of the other clock
    true        the system's clock: signatures, certificates, the audit log; it can be wrong, and can be set

No third clock tells which of the two is right. But a machine also counts the seconds since it was booted, and setting
its clock does not change that count: within one boot, a true clock that disagrees with it has been set.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from atoll.ground.printable import span
from atoll.protocol.identity.clock_hint import SKEW_S, instant

SET_BACK_MAX_S = 2 * SKEW_S
"""Largest step back of the true clock that signatures do not follow [s]: their instants continue from the last one
until the clock has caught up. A site accepts messages within `SKEW_S` of its clock. If signatures followed a shorter
step, a site that has seen the last instant would take new messages for replays; after a longer step it refuses both, so
signatures follow at once: the sites' clocks must differ from before, or be set, too. Sites forget instants that no
right clock can have shown (`client/session/rollback_rules.py`)."""
START_MAX_S = 120.0
"""Largest difference between the true clock and its expected value at a start [s]."""
JUMP_S = 5.0
"""Smallest jump of the true clock of a running process that is reported [s]; NTP slews a clock more gently."""
APART_S = 60.0
"""Smallest difference between the two clocks that is reported [s]."""
DOWN_MAX_S = 30 * 86400.0
"""Longest downtime across a boot that is believed [s]; a longer one may be a wrong year."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class MonotoneClock:
    """Clock of seconds since the epoch that never runs backward, not even across a restart.

    It is the system's clock at the start of the process, advanced by the monotonic clock: a jump of the system's clock
    moves no deadline.

    Args:
        not_before: the last instant in the journal [s since the epoch]; the clock never shows an earlier one.
        wall: the clock of the system [s since the epoch].
        monotonic: a clock that never runs backward, of any origin [s].
    """

    def __init__(
        self,
        not_before: float = 0.0,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic, self._not_before = monotonic, not_before
        self._offset = max(wall(), not_before) - monotonic()

    def now(self) -> float:
        """Return the time [s since the epoch]."""
        return max(self._not_before, self._monotonic() + self._offset)  # the sum may be rounded down

    def advance_to(self, not_before: float) -> None:
        """Advance the clock to at least this instant [s since the epoch]."""
        self._not_before = max(self._not_before, not_before)
        self._offset = max(self._offset, not_before - self._monotonic())


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading of the true clock and of the count that setting it does not change."""

    true: float
    """The system's clock [s since the epoch]."""
    uptime: float = 0.0
    """Seconds since the boot, including time asleep [s]."""
    boot: str = ""
    """Random id of the boot; empty: not known, and no two readings share a boot."""

    @classmethod
    def take(cls) -> "Reading":
        """Read this machine's clock and count."""
        uptime = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
        return cls(time.time(), uptime, _boot_id())


def next_instant(last_us: int, now_us: int) -> int:
    """Return the instant of the next signature, later than the last one unless the true clock was set far back.

    Args:
        last_us: the newest instant that was signed [us since the epoch].
        now_us: the true clock [us since the epoch].
    """
    return now_us if last_us - now_us > SET_BACK_MAX_S * 1e6 else max(now_us, last_us + 1)


def jump_between(before: Reading, now: Reading) -> float | None:
    """Return by how much the true clock was set between two readings within one boot [s]; None: the boots differ."""
    return _jump(before, now) if before.boot and before.boot == now.boot else None


def _jump(before: Reading, now: Reading) -> float:
    return (now.true - before.true) - (now.uptime - before.uptime)


def fault_at_start(last: Reading, now: Reading) -> str:
    """Return the reason to refuse a start with this clock, or "".

    Within one boot the clock must agree with the machine's count. After another boot a later time counts as downtime,
    of `DOWN_MAX_S` at most if the boot is known. A time before the last true time is always a fault.

    Args:
        last: the last reading of the previous process.
        now: the current reading.
    """
    jump = jump_between(last, now)
    by = now.true - last.true
    shows, was = (
        f"this machine's clock shows {instant(now.true)}",
        f"the journal's last true time, {instant(last.true)}",
    )
    if by < -START_MAX_S:
        fault = f"{shows}, {span(by)} behind {was}"
    elif jump is not None and abs(jump) > START_MAX_S:
        side = "ahead of" if jump > 0 else "behind"
        counted = f"{was}, and the {span(now.uptime - last.uptime)} that the machine has counted since"
        fault = f"{shows}, {span(jump)} {side} {counted}"
    elif jump is None and last.boot and by > DOWN_MAX_S:
        fault = f"{shows}, {span(by)} ahead of {was}"
    else:
        return ""
    return f"{fault}: one of the two is wrong. Set the clock (NTP) and start again, or, {ACCEPT}"


ACCEPT = "if it is right now, start once with --accept-clock"


class ClockComparison:
    """Comparison of the true clock with the machine's count and with the monotone clock, from a start on.

    Args:
        reading: at the start.
    """

    def __init__(self, reading: Reading) -> None:
        self._base = reading

    def jump(self, now: Reading) -> float:
        """Return by how much the true clock was set since the last jump or the start [s]; 0: by less than `JUMP_S`."""
        jump = _jump(self._base, now)  # one process lives within one boot, even if the boot has no id
        if abs(jump) < JUMP_S:
            return 0.0
        self._base = now
        return jump


def jumped(by: float, now: float) -> str:
    """Return the message about a jump of the true clock by `by` seconds to `now` [s since the epoch]."""
    side = "forward" if by > 0 else "back"
    return (
        f"this machine's clock was set {side} by {span(by)}: from {instant(now - by)} to {instant(now)}; signatures "
        "and certificates follow it at once, deadlines do not move"
    )


def apart(monotone: float, true: float) -> str:
    """Return the message about a monotone clock that differs from the true one [s since the epoch], or ""."""
    by = monotone - true
    if abs(by) < APART_S:
        return ""
    side = "ahead of" if by > 0 else "behind"
    return (
        f"the journal's clock shows {instant(monotone)}, {span(by)} {side} this machine's clock, which shows "
        f"{instant(true)}: one of them was wrong before; times of rounds are by the journal's clock, signatures, "
        "certificates and the audit log by the machine's"
    )


@cache
def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""

"""How many lines a stranger may cause in the audit log: what comes often is counted, and said later. Pure."""

from dataclasses import dataclass, field

from atoll.server.transport.token_bucket import Bucket

BURST = 10
"""Lines that one may cause at once."""
REFILL_S = 30.0
"""Seconds after which one more is allowed."""
ALL_BURST, ALL_REFILL_S = 1000, 0.1
"""The same of all together: about 12 MB of log an hour at most, besides what is bounded otherwise."""
KEYS_MAX = 1000
"""Who is told apart at once; further ones are counted together."""
OTHERS = "others"


@dataclass(slots=True)
class _Known:
    allowance: Bucket = field(default_factory=lambda: Bucket(1 / REFILL_S, BURST))
    withheld: int = 0


@dataclass(slots=True)
class Budget:
    """Decides for each line that somebody causes whether it is written, or counted."""

    _of: dict[str, _Known] = field(default_factory=dict)
    _all: Bucket = field(default_factory=lambda: Bucket(1 / ALL_REFILL_S, ALL_BURST))
    _sweep_at: float = 0.0

    def allows(self, who: str, now: float) -> bool:
        """Whether a line that `who` causes at `now` [s] is written. Otherwise `withheld` tells of it."""
        if who not in self._of and len(self._of) >= KEYS_MAX and now >= self._sweep_at:
            self._forget_quiet(now)
        key = who if who in self._of or len(self._of) < KEYS_MAX else OTHERS
        known = self._of.setdefault(key, _Known())
        if known.allowance.take(now) and self._all.take(now):
            return True
        known.withheld += 1
        return False

    def withheld(self) -> dict[str, int]:
        """By who has caused them: lines that were not written since this was last asked."""
        counts = {who: known.withheld for who, known in self._of.items() if known.withheld}
        for who in counts:
            self._of[who].withheld = 0
        return counts

    def _forget_quiet(self, now: float) -> None:
        """Those whose allowance is full again, and of whom nothing is to be told."""
        self._sweep_at = now + REFILL_S
        full_s = BURST * REFILL_S
        self._of = {who: k for who, k in self._of.items() if k.withheld or now - k.allowance.at < full_s}

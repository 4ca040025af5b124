"""How many lines a stranger may cause in the audit log: what comes often is counted, and said later. Pure."""

from dataclasses import dataclass, field

BURST = 10
"""Lines that one may cause at once."""
REFILL_S = 30.0
"""Seconds after which one more is allowed."""
ALL_BURST, ALL_REFILL_S = 1000, 0.1
"""The same of all together: 3 MB of log an hour at most, besides what is bounded otherwise."""
KEYS_MAX = 1000
"""Who is told apart at once; further ones are counted together."""
OTHERS = "others"


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float
    withheld: int = 0

    def take(self, now: float, burst: int, refill_s: float) -> bool:
        self.left, self.at = min(float(burst), self.left + max(0.0, now - self.at) / refill_s), now
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass(slots=True)
class Budget:
    """Decides for each line that somebody causes whether it is written, or counted."""

    _of: dict[str, _Bucket] = field(default_factory=dict)
    _all: _Bucket = field(default_factory=lambda: _Bucket(ALL_BURST, 0.0))
    _sweep_at: float = 0.0

    def allows(self, who: str, now: float) -> bool:
        """Whether a line that `who` causes at `now` [s] is written. Otherwise `withheld` tells of it."""
        if who not in self._of and len(self._of) >= KEYS_MAX and now >= self._sweep_at:
            self._forget_quiet(now)
        key = who if who in self._of or len(self._of) < KEYS_MAX else OTHERS
        bucket = self._of.setdefault(key, _Bucket(BURST, now))
        if bucket.take(now, BURST, REFILL_S) and self._all.take(now, ALL_BURST, ALL_REFILL_S):
            return True
        bucket.withheld += 1
        return False

    def withheld(self) -> dict[str, int]:
        """By who has caused them: lines that were not written since this was last asked."""
        counts = {who: bucket.withheld for who, bucket in self._of.items() if bucket.withheld}
        for who in counts:
            self._of[who].withheld = 0
        return counts

    def _forget_quiet(self, now: float) -> None:
        """Those whose allowance is full again, and of whom nothing is to be told."""
        self._sweep_at = now + REFILL_S
        full_s = BURST * REFILL_S
        self._of = {who: b for who, b in self._of.items() if b.withheld or now - b.at < full_s}

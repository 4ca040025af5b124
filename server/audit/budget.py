"""The budget of audit lines that one caller may cause; lines beyond it are counted, and the count is written later.

Pure.
"""

from dataclasses import dataclass, field

from atoll.server.transport.token_bucket import Bucket

BURST = 10
"""Number of lines that one caller may cause at once."""
REFILL_S = 30.0
"""The time after which one more line is allowed [s]."""
ALL_BURST, ALL_REFILL_S = 1000, 0.1
"""The same limits for all callers together: about 12 MB of log an hour at most, plus lines with other bounds."""
KEYS_MAX = 1000
"""Number of callers that are counted individually; all others are counted together."""
OTHERS = "others"


@dataclass(slots=True)
class _Known:
    allowance: Bucket = field(default_factory=lambda: Bucket(1 / REFILL_S, BURST))
    withheld: int = 0


@dataclass(slots=True)
class Budget:
    """Budget that decides for each line of a caller whether it is written or only counted."""

    _of: dict[str, _Known] = field(default_factory=dict)
    _all: Bucket = field(default_factory=lambda: Bucket(1 / ALL_REFILL_S, ALL_BURST))
    _sweep_at: float = 0.0

    def allows(self, who: str, now: float) -> bool:
        """Take one line of `who` at `now` [s] from the budget; False: it must not be written; `withheld` counts it."""
        if who not in self._of and len(self._of) >= KEYS_MAX and now >= self._sweep_at:
            self._forget_quiet(now)
        key = who if who in self._of or len(self._of) < KEYS_MAX else OTHERS
        known = self._of.setdefault(key, _Known())
        if known.allowance.take(now) and self._all.take(now):
            return True
        known.withheld += 1
        return False

    def withheld(self) -> dict[str, int]:
        """Return the numbers of lines that were not written since the last call, by caller."""
        counts = {who: known.withheld for who, known in self._of.items() if known.withheld}
        for who in counts:
            self._of[who].withheld = 0
        return counts

    def _forget_quiet(self, now: float) -> None:
        """Forget the callers whose allowance is full again and who have no pending count."""
        self._sweep_at = now + REFILL_S
        full_s = BURST * REFILL_S
        self._of = {who: k for who, k in self._of.items() if k.withheld or now - k.allowance.at < full_s}

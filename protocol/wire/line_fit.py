"""The bytes in flight that suit a line: as many as arrive within seconds, whatever the line's speed. Pure.

    queued = time to a confirmation - the shortest answer so far
    queued < 1 s: twice as many bytes    queued > 3 s: half as many    else unchanged

The shortest answer comes from an empty line, so a long distance alone does not slow a transfer. A confirmation of bytes
that were sent before the last change is ignored.

Source: congestion avoidance by the delay of a line, as in Brakmo and Peterson, "TCP Vegas", IEEE JSAC 13(8), 1995.
"""

import math

SHORT_S, LONG_S = 1.0, 3.0

FIRST_BYTES, LEAST_BYTES = 256 * 1024, 16 * 1024


class LineFit:
    """Number of bytes that may be on the line at once.

    Args:
        most: the largest number; a fast line reaches it after a few confirmations.
    """

    def __init__(self, most: int) -> None:
        self._most, self.num_bytes = most, min(FIRST_BYTES, most)
        self._shortest, self._changed_at = math.inf, -math.inf

    def answered(self, seconds: float) -> None:
        """Record the time of an answer to a message without bulk bytes [s]."""
        self._shortest = min(self._shortest, seconds)

    def confirmed(self, sent_at: float, now: float) -> None:
        """Record that bytes sent at `sent_at` have arrived; both times are on one clock [s]."""
        self.answered(now - sent_at)
        if sent_at < self._changed_at:
            return
        queued, before = now - sent_at - self._shortest, self.num_bytes
        if queued < SHORT_S:
            self.num_bytes = min(self._most, 2 * before)
        elif queued > LONG_S:
            self.num_bytes = max(LEAST_BYTES, before // 2)
        if self.num_bytes != before:
            self._changed_at = now

"""How often somebody may try: one bucket of tokens for each name. Pure."""

from collections import OrderedDict

NAMES_MAX = 10_000
"""Names that are remembered; of more, those that tried longest ago are forgotten, and their buckets full again."""


class Buckets:
    """A token is taken by each try, and comes back with time.

    Args:
        burst: tokens in a full bucket.
        per_second: tokens that come back.
    """

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst, self._per_second = burst, per_second
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()  # and when that was

    def take(self, name: str, now: float) -> bool:
        """Whether one more try is allowed; one that is not costs nothing. `now` in s, of any clock that only grows."""
        tokens, since = self._tokens.pop(name, (self._burst, now))
        tokens = min(self._burst, tokens + max(0.0, now - since) * self._per_second)
        is_allowed = tokens >= 1
        self._tokens[name] = (tokens - is_allowed, now)
        while len(self._tokens) > NAMES_MAX:
            self._tokens.popitem(last=False)
        return is_allowed

    def put_back(self, name: str) -> None:
        """A try that was none after all, as of somebody who had every right to it."""
        if name in self._tokens:
            tokens, since = self._tokens[name]
            self._tokens[name] = (min(self._burst, tokens + 1), since)

"""Rate limits by name: a token bucket for each. Pure."""

from atoll.ground.bounded_mapping import BoundedMapping
from atoll.server.transport.token_bucket import Bucket

NAMES_MAX = 10_000
"""Number of names that are remembered; the oldest beyond it are forgotten, and their buckets are full again."""


class RateLimits:
    """Token buckets of all names: each try takes a token.

    Args:
        burst: the tokens in a full bucket.
        per_second: the rate at which tokens return [1/s].
    """

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst, self._per_second = burst, per_second
        self._buckets: BoundedMapping[str, Bucket] = BoundedMapping(NAMES_MAX)

    def take(self, name: str, now: float) -> bool:
        """Take a token of a name at `now` [s], on a clock that never runs backward; False: its bucket is empty."""
        bucket = self._buckets.setdefault(name, Bucket(self._per_second, self._burst))
        return bucket.take(now)

    def put_back(self, name: str) -> None:
        """Return the token of a try that should not count, such as one that has succeeded."""
        if name in self._buckets:
            self._buckets[name].put_back()

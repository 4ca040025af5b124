"""How often somebody may try: one bucket of tokens for each name. Pure."""

from atoll.protocol.bounded_mapping import BoundedMapping
from atoll.server.transport.token_bucket import Bucket

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
        self._buckets: BoundedMapping[str, Bucket] = BoundedMapping(NAMES_MAX)

    def take(self, name: str, now: float) -> bool:
        """Whether one more try is allowed; one that is not costs nothing. `now` in s, of any clock that only grows."""
        bucket = self._buckets.setdefault(name, Bucket(self._per_second, self._burst))
        return bucket.take(now)

    def put_back(self, name: str) -> None:
        """A try that was none after all, as of somebody who had every right to it."""
        if name in self._buckets:
            self._buckets[name].put_back()

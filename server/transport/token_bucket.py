"""The token bucket: a rate limit with a burst. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Bucket:
    """Token bucket: `burst` tokens when full [1], refilled at `per_s` [1/s]."""

    per_s: float
    burst: float
    left: float = -1.0
    at: float = 0.0

    def take(self, now: float) -> bool:
        """Take a token at `now` [s]; return False if there is none. A clock that runs backward refills nothing."""
        if self.left < 0:
            self.left, self.at = self.burst, now
        self.left, self.at = min(self.burst, self.left + max(0.0, now - self.at) * self.per_s), max(self.at, now)
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def put_back(self) -> None:
        """Return the token that was taken last."""
        self.left = min(self.burst, self.left + 1)

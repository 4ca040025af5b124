"""How often something may happen: so many at once, and so many each second. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Bucket:
    """A token bucket: so many at once, and so many each second [1/s]."""

    per_s: float
    burst: float
    left: float = -1.0
    at: float = 0.0

    def take(self, now: float) -> bool:
        """Whether there is one more at `now` [s]; a clock that runs backward gives nothing."""
        if self.left < 0:
            self.left, self.at = self.burst, now
        self.left, self.at = min(self.burst, self.left + max(0.0, now - self.at) * self.per_s), max(self.at, now)
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def put_back(self) -> None:
        """What was taken last was nobody's after all."""
        self.left = min(self.burst, self.left + 1)

"""The time between two checkpoints within a round: "300 s", "5 min", "1 h", "50 steps", or "0" for none. No torch."""

import re
from dataclasses import dataclass

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
SECONDS_MAX, STEPS_MAX = 7 * 86400.0, 10**9

ALLOWED = 'a number with a unit, "300 s", "5 min", "1 h" or "50 steps"; "0": none'


@dataclass(frozen=True, slots=True)
class Interval:
    """A number of seconds, or of steps; both 0: never."""

    seconds: float = 0.0
    steps: int = 0

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """Parse an interval as a person writes it.

        Raises:
            ValueError: it is none; with what is allowed.
        """
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.ASCII)
        number, unit = found.groups() if found else ("", "")
        if found and float(number) == 0:
            return cls()
        if unit in ("step", "steps") and number.isdecimal() and int(number) <= STEPS_MAX:
            return cls(steps=int(number))
        if unit in UNITS and float(number) * UNITS[unit] <= SECONDS_MAX:
            return cls(seconds=float(number) * UNITS[unit])
        if found and not unit:
            raise ValueError(f'got {text}, which has no unit: write "{text} s" for seconds, or "{text} steps"')
        raise ValueError(f"got {text!r}; allowed: {ALLOWED}, at most 7 days or {STEPS_MAX:,} steps")

    @property
    def is_never(self) -> bool:
        """Whether there are no checkpoints."""
        return not self.seconds and not self.steps


NEVER = Interval()

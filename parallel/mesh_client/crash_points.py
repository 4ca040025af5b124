"""Named steps of a rank at which a drill may kill or stop it. Without torch.

`ATOLL_CRASH_RANK=FILE` in the agent's environment names a file with a planned end, `STEP[:N] RANK [stop]`. The rank
with this number renames it to `FILE.done` when its process reaches the step for the N-th time, and ends as by
`kill -9`, or hangs as by SIGSTOP. So a plan ends one process, and not its replacements, and the next plan may follow.
Without the variable `reached` does nothing.
"""

import os
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VARIABLE = "ATOLL_CRASH_RANK"

STEPS = (
    ("crew.starting", "a rank has started, and has not met the others"),
    ("crew.loading", "the ranks are together, the task is not loaded"),
    ("crew.filling", "the model is built, a rank has read none of its boxes of the version"),
    ("crew.filled", "the version or the checkpoint is loaded, no step is made"),
    ("crew.mid_step", "a step has its loss and no gradient; the other ranks wait in a collective"),
    ("crew.stepped", "a step is made, no checkpoint has it"),
    ("crew.saving", "a checkpoint within the round is due, nothing of it is on disk"),
    ("crew.saved", "a checkpoint within the round is being written"),
    ("crew.trained", "the last step is made, nothing of the update is written"),
    ("crew.part_written", "a rank's part of the update is written, others may be missing"),
    ("crew.answering", "every part of the update is written, the agent does not know it"),
    ("crew.part_encoded", "a rank's part for a secure sum is encoded and durable, others may be missing"),
    ("crew.part_masked", "a rank's part is masked, others may be missing"),
)
"""All steps, each with the state of the rank there."""

OF_SUMS = ("crew.part_encoded", "crew.part_masked")
"""The steps that ranks reach in runs with secure sums alone."""

_NAMES = frozenset(name for name, _ in STEPS)
_FILE = os.environ.get(VARIABLE, "")
_visits: Counter[tuple[str, str]] = Counter()


@dataclass(frozen=True, slots=True)
class PlannedEnd:
    """The planned end of one rank in a drill: step, number of the visit, rank, kill or stop."""

    step: str
    visit: int
    rank: int
    is_stop: bool = False
    """The rank is stopped, not killed."""

    @classmethod
    def parse(cls, text: str) -> "PlannedEnd":
        """Return the end that a file names.

        Raises:
            ValueError: the text names no end.
        """
        place, *rest = text.split() or [""]
        step, _, count = place.partition(":")
        numbers = [count or "1", *rest[:1]]
        is_counted = all(number.isascii() and number.isdigit() for number in numbers) and int(count or 1) >= 1
        if step not in _NAMES or not is_counted or len(rest) not in (1, 2) or rest[1:] not in ([], ["stop"]):
            raise ValueError(
                f"{VARIABLE}: {text.strip()!r} plans no end of a rank; allowed: STEP RANK, STEP:N RANK with N >= 1, or "
                f"either with stop after it; steps: {', '.join(sorted(_NAMES))}"
            )
        return cls(step, int(count or 1), int(rest[0]), bool(rest[1:]))


@cache
def _rank() -> int:
    """Return the number of this rank; the import is of torch, which a rank has."""
    from atoll.parallel.world import read_world

    return read_world().rank


def reached(step: str) -> None:
    """Mark that this rank is at `step`, and end it here if the environment asks for that.

    Raises:
        ValueError: the environment's file plans no end.
    """
    assert step in _NAMES, f"step {step!r} is not in STEPS"
    if not _FILE:
        return
    with suppress(FileNotFoundError):
        text = Path(_FILE).read_text("utf-8")
        planned = PlannedEnd.parse(text)
        if planned.step != step or planned.rank != _rank():
            return
        _visits[step, text] += 1
        if _visits[step, text] == planned.visit:
            os.replace(_FILE, f"{_FILE}.done")
            os.kill(os.getpid(), signal.SIGSTOP if planned.is_stop else signal.SIGKILL)

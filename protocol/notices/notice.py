"""A notice: a condition, its subject, and one sentence that says what is wrong, where, and what to do. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from atoll.ground.printable import some_of

FEW = 3
"""Largest number of notices of one condition with a message each; more at once are one message."""


class Condition(StrEnum):
    """Condition that is reported to an operator."""

    RUN_FAILED = "run_failed"
    RUN_PAUSED = "run_paused"
    RUN_STOPPED = "run_stopped"
    RUN_FINISHED = "run_finished"
    AWAY = "away"
    """A site, or at an agent the coordinator, is away for longer than `notify.away`."""
    APPROVAL = "approval"
    DISK = "disk"
    CERTIFICATE = "certificate"
    CLOCK = "clock"
    AUDIT = "audit"
    VERSION = "version"
    TEST = "test"
    """The test of `atoll notify`."""


CERTIFICATE_LEFT = 1 / 4
"""Fraction of its lifetime that a certificate has left when it is reported: its renewal, due at a third, has failed for
long."""

ENDS = frozenset(
    {Condition.RUN_FAILED, Condition.RUN_PAUSED, Condition.RUN_STOPPED, Condition.RUN_FINISHED},
)
"""Conditions of a run that begin with its state and are reported once, however long the state lasts."""

_LEVELS = {
    Condition.RUN_FAILED: "error",
    Condition.RUN_FINISHED: "info",
    Condition.RUN_STOPPED: "info",
    Condition.VERSION: "info",
    Condition.TEST: "info",
    Condition.AUDIT: "error",
}


@dataclass(frozen=True, slots=True)
class Notice:
    """Condition of one subject. It has only names, times and sizes: neither metrics nor labels nor weights."""

    condition: Condition
    subject: str
    """The run, site, file or clock that the notice concerns."""
    sentence: str
    run: str = ""
    hold: float = 0.0
    """Time for which the condition must last before it is reported [s]."""
    is_logged: bool = False
    """Whether the log has the sentence already."""
    is_once: bool = False
    """Whether the condition is reported once, however long it lasts; conditions in `ENDS` always are."""

    @property
    def key(self) -> str:
        """Key of the condition and the subject: at most one message per hour."""
        return f"{self.condition} {self.subject}"

    @property
    def level(self) -> str:
        """Level of its line in the log: `info`, `warning` or `error`."""
        return _LEVELS.get(self.condition, "warning")


def merged(notices: list[Notice]) -> Notice:
    """Merge several notices of one condition into one: the first sentence, and the other subjects by name."""
    first, *others = notices
    if not others:
        return first
    return Notice(
        first.condition,
        f"{first.subject} and {len(others)} more",
        f"{first.sentence}; the same of {some_of(each.subject for each in others)}",
        is_logged=first.is_logged,
    )

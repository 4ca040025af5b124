"""What can go wrong with a checkpoint. Every rank raises the same, with what each of them has found.

CheckpointFailed    (RuntimeError)  it was not written; the older ones are untouched
CheckpointBroken    (ValueError)    it is not there, not complete, or its bytes are wrong
CheckpointMismatch  (ValueError)    it is of another model or another optimizer
"""

from collections.abc import Sequence

FAULTS_SHOWN = 40
"""A message lists so many differences at most: a model of another kind differs in every name."""


class CheckpointFailed(RuntimeError):
    """A checkpoint was not written; the message has each rank's own reason, and what is the latest one still."""


class CheckpointBroken(ValueError):
    """A checkpoint is not there, not complete, or cannot be read; the message says what is wrong with which file."""


class CheckpointMismatch(ValueError):
    """Model and checkpoint differ in names, shapes or dtypes, or the optimizers in kind; the message lists it."""


def listed(faults: Sequence[str]) -> str:
    """The faults in one line, each once, in their order."""
    different = list(dict.fromkeys(faults))
    more = len(different) - FAULTS_SHOWN
    return "; ".join(different[:FAULTS_SHOWN]) + (f"; and {more} more" if more > 0 else "")

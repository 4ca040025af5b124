"""The errors of checkpoints. Every rank raises the same error, with the faults of all.

CheckpointFailed    (RuntimeError)  it was not written; the older ones are untouched
CheckpointBroken    (ValueError)    it does not exist, is not complete, or its bytes are wrong
CheckpointMismatch  (ValueError)    it is of another model or another optimizer
"""

from collections.abc import Sequence

from atoll.ground.printable import some_of

FAULTS_SHOWN = 40
"""Largest number of differences in a message: a model of another kind differs in every name."""


class CheckpointFailed(RuntimeError):
    """A checkpoint was not written; the message has each rank's reason, and the latest one that still exists."""


class CheckpointBroken(ValueError):
    """A checkpoint does not exist, is not complete, or cannot be read; the message names the file and the fault."""


class CheckpointMismatch(ValueError):
    """Model and checkpoint differ in names, shapes or dtypes, or the optimizers in kind; the message lists it."""


def reason(error: BaseException) -> str:
    """Return the message of an error, or its type if it has none."""
    return str(error) or type(error).__name__


def listed(faults: Sequence[str]) -> str:
    """Return the faults in one line, each once, in their order."""
    return some_of(dict.fromkeys(faults), FAULTS_SHOWN, "; ")

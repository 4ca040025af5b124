"""Trial: a run of a task's code that finds faults before a training, and leaves no trace.

A trial gets a way to run a task and yields its faults. It runs the code both ways (a batch and its parts, one process
and a plan, once and again) and compares; none reads source or bytecode. What only real steps show is watched in them:
`unit_check`, `same_form`, `contract`.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from atoll.task.errors import TaskBroken
from atoll.task.randomness import generators_kept
from atoll.training.model.as_built import AsBuilt

Way = TypeVar("Way")
Given = TypeVar("Given", contravariant=True)


class Trial(Protocol[Given]):
    """Function of a way to run a task that yields its faults: sentences with the value and the way out."""

    def __call__(self, way: Given, /) -> Iterable[str]:
        """Yield the faults; nothing if the task is sound, or cannot be run so: its first step reports that."""
        ...


class Fault(str):
    """Sentence of a fault, with the error of the task's code that shows it."""

    cause: BaseException | None

    def __new__(cls, sentence: str, cause: BaseException | None = None) -> "Fault":
        """Return the sentence with its cause."""
        fault = super().__new__(cls, sentence)
        fault.cause = cause
        return fault


def refuse(trials: Iterable[Trial[Way]], way: Way) -> None:
    """Run trials in their order until one has faults; later trials might find the same faults again.

    Raises:
        TaskBroken: a trial has faults, which the message lists; its cause is the cause of the first fault.
    """
    for trial in trials:
        if faults := [*trial(way)]:
            raise TaskBroken(*faults) from getattr(faults[0], "cause", None)


@contextmanager
def undone(**parts: Any) -> Iterator[AsBuilt]:
    """Run code of a task in the block; restore the state of its parts, the process and the generators at the end.

    Provides the state before: `is_complete` tells whether all of it can be restored.
    """
    before = AsBuilt(parts, with_process=True)
    try:
        with generators_kept():
            yield before
    finally:
        before.restore()


def eager() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs eagerly; the compiler is not imported for it."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()

"""The task of a call: an object, or a reference as the command line takes it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from atoll.interface.errors import AtollError
from atoll.plugins.reference import loaded_now
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task, is_task

OF_A_FILE = "_atoll_user_"
"""The beginning of the private name under which a task's file is loaded."""

IN_NO_FILE = "other processes cannot import a task of a cell or of standard input: put it into a file"
"""The refusal of a task that is in no file where other processes need it."""


@dataclass(frozen=True, slots=True)
class Named:
    """A task with its reference."""

    task: Task | ArrayTask
    reference: str
    is_of_a_cell: bool
    """The task was made in a notebook's cell or at a prompt, so that no other process can import it."""


def named(task: Task | ArrayTask | str) -> Named:
    """Return a task with its reference.

    Raises:
        AtollError: the object is no task, or the call is one of a task's file while it is loaded.
        CommandError: there is no such reference, or its code fails.
    """
    refuse_within_a_load()
    if isinstance(task, str):
        from atoll.operations.load import load_user_task

        return Named(load_user_task(task), task, is_of_a_cell=False)
    if not is_task(task):
        allowed = "a Task, an ArrayTask, or path/to/file.py:attribute"
        raise AtollError(f"task: got {type(task).__name__}; allowed: {allowed}")
    for module in sorted(sys.modules.values(), key=_is_interactive):  # a file that others can import comes first
        if (attribute := _attribute_of(module, task)) is not None:
            return Named(task, _reference(module, attribute), is_of_a_cell=_is_interactive(module))
    return Named(task, "__main__:task", is_of_a_cell=_is_interactive(sys.modules["__main__"]))


def refuse_within_a_load() -> None:
    """Refuse a training that a task's file begins while it is loaded: each process that loads it would begin another.

    Raises:
        AtollError: such a file is being loaded.
    """
    if file := loaded_now():
        raise AtollError(
            f"{file} is loaded as a task, and trains while it is: put its calls of Atoll under "
            'if __name__ == "__main__":, so that other processes can load it'
        )


def reference_of(task: Task | ArrayTask) -> str:
    """Return the reference of a task for other processes.

    Raises:
        AtollError: the task is of a cell, which no other process can import.
    """
    of_call = named(task)
    if of_call.is_of_a_cell:
        raise AtollError(f"task: {IN_NO_FILE}")
    return of_call.reference


def _attribute_of(module: Any, task: Any) -> str | None:
    if not isinstance(module, ModuleType) or module.__name__.startswith("atoll.interface"):
        return None
    return next((name for name, value in list(vars(module).items()) if value is task and name.isidentifier()), None)


def _reference(module: ModuleType, attribute: str) -> str:
    file = getattr(module, "__file__", None)
    is_by_file = module.__name__ == "__main__" or module.__name__.startswith(OF_A_FILE)
    if not is_by_file or file is None or _is_interactive(module):
        return f"{module.__name__}:{attribute}"
    return f"{Path(file).resolve()}:{attribute}"


def _is_interactive(module: Any) -> bool:
    """Return whether a module is the code of a cell, of a prompt, of `python -c` or of standard input: of no file."""
    if module is not sys.modules["__main__"]:
        return False
    file = getattr(module, "__file__", None)
    return file is None or not Path(file).is_file()

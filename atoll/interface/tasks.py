"""The task of a call: an object, or a reference as the command line takes it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.task import Task, is_task, load_task

OF_A_FILE = "_atoll_user_"
"""The beginning of the private name under which a task's file is loaded."""


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
        TypeError: the object is no task.
        TaskNotFound: there is no such reference.
    """
    if isinstance(task, str):
        return Named(load_task(task), task, is_of_a_cell=False)
    if not is_task(task):
        raise TypeError(f"task: got {type(task).__name__}; allowed: a Task, an ArrayTask, or path/to/file.py:attribute")
    for module in list(sys.modules.values()):
        if (attribute := _attribute_of(module, task)) is not None:
            return Named(task, _reference(module, attribute), is_of_a_cell=_is_interactive(module))
    return Named(task, "__main__:task", is_of_a_cell=_is_interactive(sys.modules["__main__"]))


def _attribute_of(module: Any, task: Any) -> str | None:
    if not isinstance(module, ModuleType) or module.__name__.startswith("atoll.interface"):
        return None
    return next((name for name, value in list(vars(module).items()) if value is task and name.isidentifier()), None)


def _reference(module: ModuleType, attribute: str) -> str:
    file = getattr(module, "__file__", None)
    is_by_file = module.__name__ == "__main__" or module.__name__.startswith(OF_A_FILE)
    return f"{Path(file).resolve()}:{attribute}" if is_by_file and file else f"{module.__name__}:{attribute}"


def _is_interactive(module: ModuleType) -> bool:
    return module.__name__ == "__main__" and getattr(module, "__file__", None) is None

"""The errors of a task, one class for each kind. Every message names the value and the allowed values.

TaskNotFound  (Refused, a ValueError)  no task under this reference
TaskBroken    (Refused)                the task's code or data cannot be used
TaskMismatch  (Refused)                the global model and the task's model differ in names, shapes or dtypes
NotFinite     (Refused)                an infinity or NaN where numbers are needed
OutOfTime     (RuntimeError)           the deadline came before the first step
"""

from atoll.ground.faults import Refused


class TaskNotFound(Refused):
    """No task exists under the given reference."""


class TaskBroken(Refused):
    """The task's code or data cannot be used; its author has to fix it."""


class TaskMismatch(Refused):
    """The arrays do not fit the task's model; the message lists every difference."""


class NotFinite(Refused):
    """A tensor holds an infinity or NaN; the message names it."""


class OutOfTime(RuntimeError):
    """The deadline came before the first step, so there is no update."""

"""The errors of a task, one class for each kind. Every message names the value and the allowed values.

TaskNotFound  (ValueError)     no task under this reference
TaskBroken    (ValueError)     the task's code or data cannot be used
TaskMismatch  (ValueError)     the global model and the task's model differ in names, shapes or dtypes
NotFinite     (ValueError)     an infinity or NaN where numbers are needed
OutOfTime     (RuntimeError)   the deadline came before the first step
"""


class TaskNotFound(ValueError):
    """No task exists under the given reference."""


class TaskBroken(ValueError):
    """The task's code or data cannot be used; its author has to fix it."""


class TaskMismatch(ValueError):
    """The arrays do not fit the task's model; the message lists every difference."""


class NotFinite(ValueError):
    """A tensor holds an infinity or NaN; the message names it."""


class OutOfTime(RuntimeError):
    """The deadline came before the first step, so there is no update."""

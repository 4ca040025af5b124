"""What can go wrong with a task, one name for each. Every message says what was found and what is allowed.

TaskNotFound  (ValueError)     no task under this reference
TaskBroken    (ValueError)     the task's own code or data cannot be used
TaskMismatch  (ValueError)     the global model and the task's model differ in names, shapes or dtypes
NotFinite     (ValueError)     an infinity or NaN where numbers are needed
OutOfTime     (RuntimeError)   the deadline came before the first step
"""


class TaskNotFound(ValueError):
    """There is no task under the reference that was given."""


class TaskBroken(ValueError):
    """The task's own code or data cannot be used; its author has to mend it."""


class TaskMismatch(ValueError):
    """The arrays do not belong to the task's model; the message lists every difference."""


class NotFinite(ValueError):
    """A tensor holds an infinity or NaN; the message names it."""


class OutOfTime(RuntimeError):
    """Not one step was possible before the deadline, so there is no update."""

"""The exit of code of an app: what it has registered for it, such as the end of a log, runs before our process goes."""

import atexit
from typing import Any


def run_exit_functions() -> None:
    """Call what is registered with `atexit`, the newest first: a process that is killed or left early would not."""
    of_python: Any = atexit
    of_python._run_exitfuncs()  # errors are printed, as at any exit

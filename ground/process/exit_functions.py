"""The exit functions that an app has registered, such as closing a log, called before Atoll's process exits."""

import atexit
from typing import Any


def run_exit_functions() -> None:
    """Call the functions registered with `atexit`, the newest first; a killed process would not."""
    of_python: Any = atexit
    of_python._run_exitfuncs()  # errors are printed, as at any exit

"""The limits of a server's process: open files, and the thresholds of Python's garbage collector."""

import gc
import resource

YOUNG, OLD = 50_000, 20
"""New containers before a collection of the youngest generation, and collections before the next older generation."""


def allow_open_files() -> None:
    """Raise the limit of open files to the system's maximum: 1,000 clients need more than the usual 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def collect_seldom() -> None:
    """Collect cycles less often than after the default of 700 new containers.

    A million members are millions of objects that live as long as the run. With the default, repeated collections of
    all of them took half of the time of their arrival. Objects without cycles are freed at once in any case.
    """
    gc.set_threshold(YOUNG, OLD, OLD)

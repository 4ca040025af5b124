"""The limits of a server's process: open files, and the pace of Python's garbage collector."""

import gc
import resource

YOUNG, OLD = 50_000, 20
"""Containers that are made before the young ones are looked at, and looks before the old ones are looked at, too."""


def allow_open_files() -> None:
    """Raise the limit of open files to the system's maximum: a thousand clients need more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def collect_seldom() -> None:
    """Look for cycles less often than after every 700 new objects.

    A million members are millions of objects that live as long as the run; while they come, Python looks at all of
    them again and again, which took half of the time. What has no cycle is freed at once in any case.
    """
    gc.set_threshold(YOUNG, OLD, OLD)

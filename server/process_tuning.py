"""The limits of a server's process: open files, and the times of Python's garbage collections."""

import asyncio
import gc
import resource

YOUNG, OLD = 50_000, 20
"""New containers before a collection of the youngest generation, and collections before the next older generation."""

INTERVAL_S = 10.0
"""Seconds between two collections of the younger generations."""


def allow_open_files() -> None:
    """Raise the limit of open files to the system's maximum: 1,000 clients need more than the usual 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def collect_seldom() -> None:
    """Collect cycles less often than with the default of 700 new containers.

    A million members are millions of objects that live as long as the run. With the default, repeated collections of
    all of them took half of the time of their arrival. Objects without cycles are freed at once in any case.
    """
    gc.set_threshold(YOUNG, OLD, OLD)


def collect_regularly(interval_s: float = INTERVAL_S) -> None:
    """Collect garbage of the two younger generations now and every `interval_s` [s], while the running loop runs.

    Each gRPC call leaves a cycle behind that keeps memory of its C library, and so does each SQLAlchemy statement: 0.7
    MB for an upload of 200 MB. With the thresholds of `collect_seldom` they would wait for hundreds of uploads. The
    oldest generation, such as a run's members, is not visited.
    """
    gc.collect(1)
    asyncio.get_running_loop().call_later(interval_s, collect_regularly, interval_s)

"""How a process that holds very many small objects for long spends its time and memory."""

import gc

YOUNG, OLD = 50_000, 20
"""Containers that are made before the young ones are looked at, and looks before the old ones are looked at, too."""


def collect_seldom() -> None:
    """Look for cycles less often than after every 700 new objects.

    A million members are millions of objects that live as long as the run; while they come, Python looks at all of
    them again and again, which took half of the time. What has no cycle is freed at once in any case.
    """
    gc.set_threshold(YOUNG, OLD, OLD)

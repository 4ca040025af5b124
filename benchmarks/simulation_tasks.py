"""The tasks of `simulation`: one file, as users have it."""

from benchmarks.simulation_side import task_of
from benchmarks.tight_loops import SETTINGS


def __getattr__(name: str) -> object:
    if (setting := name.replace("_", "-")) in SETTINGS:
        return task_of(setting)
    raise AttributeError(name)

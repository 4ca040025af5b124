"""The tasks of `simulation`, in one file, as a user's tasks are."""

from benchmarks.simulation_side import task_of
from benchmarks.tight_loops import SETTINGS


def __getattr__(name: str) -> object:
    setting = name.removeprefix("of_").replace("_", "-")  # of_: no name begins with the 2 of 2nn
    if name.startswith("of_") and setting in SETTINGS:
        return task_of(setting)
    raise AttributeError(name)

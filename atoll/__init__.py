"""Federated learning of one `Task`: the same object for a coordinator with agents, a simulation and a centralized
training.

Everything that a project of yours imports is here:

    Task           a model in PyTorch, its data, loss and metrics
    Algorithm      the client's side of a federated algorithm of one's own
    Local          the settings of the local training in one round
    Context        the circumstances of a call of a task's function: site, round, version, options, settings
    Statistic      a number of a site's data, and the rule by which those of sites are merged
    Metric         a metric whose value is more than a ratio of two sums
    ArrayTask      the protocol of a task in numpy arrays, for scikit-learn and all else that is not PyTorch
    Instructions   the request to an `ArrayTask` for one local training
    Trained        the result of that training
    Deadline       the end of the time that a training has
    task_name      the name of a task, the same on every machine
    load_task      the task that a reference `path/to/file.py:attribute` names
    simulate       a federation on this machine, as `atoll simulate`
    SimulatedRun   the run that it returns
    train          a centralized training, as `atoll train`
    Training       the training that it returns
    connect        the runs of a coordinator, from its state directory or over the network
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.interface.deployed import connect
    from atoll.interface.simulated import SimulatedRun, simulate
    from atoll.interface.trained import Training, train
    from atoll.parallel.task.algorithm import Algorithm
    from atoll.parallel.task.array_task import ArrayTask, Instructions, Trained
    from atoll.parallel.task.context import Context
    from atoll.parallel.task.deadline import Deadline
    from atoll.parallel.task.local import Local
    from atoll.parallel.task.metrics import Metric
    from atoll.parallel.task.statistic import Statistic
    from atoll.parallel.task.task import Task, load_task, task_name

__version__ = "0.1.0"

_PLACES = {
    "atoll.interface.deployed": ("connect",),
    "atoll.interface.simulated": ("SimulatedRun", "simulate"),
    "atoll.interface.trained": ("Training", "train"),
    "atoll.parallel.task.algorithm": ("Algorithm",),
    "atoll.parallel.task.array_task": ("ArrayTask", "Instructions", "Trained"),
    "atoll.parallel.task.context": ("Context",),
    "atoll.parallel.task.deadline": ("Deadline",),
    "atoll.parallel.task.local": ("Local",),
    "atoll.parallel.task.metrics": ("Metric",),
    "atoll.parallel.task.statistic": ("Statistic",),
    "atoll.parallel.task.task": ("Task", "load_task", "task_name"),
}
"""The public names by their modules, which are imported at the first use of a name."""

__all__ = [
    "Algorithm",
    "ArrayTask",
    "Context",
    "Deadline",
    "Instructions",
    "Local",
    "Metric",
    "SimulatedRun",
    "Statistic",
    "Task",
    "Trained",
    "Training",
    "connect",
    "load_task",
    "simulate",
    "task_name",
    "train",
]


def __getattr__(name: str) -> Any:
    """Return a public name, imported at its first use."""
    from importlib import import_module

    for module, names in _PLACES.items():
        if name in names:
            globals()[name] = found = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *__all__})

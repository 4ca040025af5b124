"""Federated learning of one `Task`: the same object for a coordinator with agents, a simulation and a centralized
training.

Everything that a project of yours imports is here:

    Task           a model in PyTorch, its data, loss and metrics
    Local          the settings of the local training in one round
    Context        the circumstances of a call of a task's function: site, round, version, options, settings
    Metric         a metric whose value is more than a ratio of two sums
    ArrayTask      the protocol of a task in numpy arrays, for scikit-learn and all else that is not PyTorch
    Instructions   the request to an `ArrayTask` for one local training
    Trained        the result of that training
    Deadline       the end of the time that a training has
    load_task      the task that a reference `path/to/file.py:attribute` names
    task_name      the name of a task, the same on every machine
"""

from atoll.parallel.task.array_task import ArrayTask, Instructions, Trained
from atoll.parallel.task.context import Context
from atoll.parallel.task.deadline import Deadline
from atoll.parallel.task.local import Local
from atoll.parallel.task.metrics import Metric
from atoll.parallel.task.task import Task, load_task, task_name

__version__ = "0.1.0"

__all__ = [
    "ArrayTask",
    "Context",
    "Deadline",
    "Instructions",
    "Local",
    "Metric",
    "Task",
    "Trained",
    "load_task",
    "task_name",
]

"""Atoll: one Task, run as a coordinator, as agents, as a simulation or as a centralized training."""

from atoll.parallel.task.array_task import ArrayTask, Instructions, Trained
from atoll.parallel.task.deadline import Deadline
from atoll.parallel.task.local import Local
from atoll.parallel.task.metrics import Metric
from atoll.parallel.task.task import Task, load_task, task_name

__version__ = "0.1.0"

__all__ = [
    "ArrayTask",
    "Deadline",
    "Instructions",
    "Local",
    "Metric",
    "Task",
    "Trained",
    "load_task",
    "task_name",
]

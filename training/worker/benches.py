"""The construction of the `Bench` for any kind of task, for the worker process and the simulator."""

from typing import Any

from atoll.task.apps import AppTask
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task
from atoll.training.worker.array_bench import ArrayBench
from atoll.training.worker.bench import Bench


def bench_of(task: Task | ArrayTask, request: dict[str, Any]) -> Bench:
    """Make the `Bench` of a task of any kind with the data of a request's site."""
    if isinstance(task, Task):
        from atoll.training.worker.model_bench import ModelBench  # imports torch, which an ArrayTask need not have

        return ModelBench(task, request)
    bench: Bench = task.bench(request) if isinstance(task, AppTask) else ArrayBench(task, request)
    return bench

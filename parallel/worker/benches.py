"""The bench of a task of any kind, as the worker process and the simulator make it."""

from typing import Any

from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.task import Task
from atoll.parallel.worker.array_bench import ArrayBench
from atoll.parallel.worker.bench import Bench
from atoll.parallel.worker.flower_task import FlowerTask


def bench_of(task: Task | ArrayTask, request: dict[str, Any]) -> Bench:
    """Return the bench of a task and a request's site."""
    if isinstance(task, Task):
        from atoll.parallel.worker.model_bench import ModelBench  # imports torch, which an ArrayTask need not have

        return ModelBench(task, request)
    return task.bench(request) if isinstance(task, FlowerTask) else ArrayBench(task, request)

"""The context of a product of many clients: what they have in common, and a refusal of the rest."""

from typing import Any

from atoll.parallel.task.context import Context
from atoll.parallel.task.task import Task
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.engine import Job

COMMON = ("round", "version", "options")


class SharedContext(Context):
    """The context of the clients of one product; see `Context`.

    Args:
        task: the task, with its options.
        job: the job of any of the clients.

    Raises:
        CannotBatch: from a field in which the clients differ.
    """

    def __init__(self, task: Task, job: Job) -> None:
        super().__init__(round=job.round_id, version=job.version, options=task.options)

    def __getattribute__(self, name: str) -> Any:
        if name in Context.__dataclass_fields__ and name not in COMMON:
            raise CannotBatch(f"the loss or a metric reads context.{name}, which differs between the clients")
        return super().__getattribute__(name)

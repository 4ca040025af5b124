"""Whether the same client with the same seed gives the same update: without that nothing of a simulation repeats."""

from collections.abc import Sequence

import numpy as np

from atoll.parallel.arrays import Arrays
from atoll.parallel.errors import TaskBroken
from atoll.simulations.engines.engine import Engine, Failed, Job, Trained

CLIENTS = 2
STEPS = 3


class NotDeterministic(TaskBroken):
    """Two trainings of the same client with the same seed differ; the message says where, and what to look for."""


def check_deterministic(engine: Engine, version: Arrays, client_ids: Sequence[str]) -> None:
    """Train the first few clients twice, a few steps of each.

    Args:
        engine: best the sequential one, in which the second training follows the first in one process.
        version: that they train from.
        client_ids: of the run.

    Raises:
        NotDeterministic: two updates differ.
        ClientFailed: the task's code failed.
    """
    jobs = [Job(client_id, seed=number, steps=STEPS) for number, client_id in enumerate(client_ids[:CLIENTS])]
    first, second = [[_arrays(result) for result in engine.train(version, jobs)] for _ in range(2)]
    for job, before, after in zip(jobs, first, second, strict=True):
        for name, array in before.items():
            if not np.array_equal(array, after[name], equal_nan=True):
                distance = float(np.max(np.abs(array.astype(np.float64) - after[name])))
                raise NotDeterministic(
                    f"the task is not deterministic: two trainings of client {job.client_id} with the same seed differ "
                    f"in {name} by up to {distance:.1e}. Look for a generator that the seed does not set, for what is "
                    "kept from one training to the next, and for operations that torch.use_deterministic_algorithms "
                    "warns of"
                )


def _arrays(result: Trained | Failed) -> Arrays:
    if isinstance(result, Failed):
        return {}
    return {name: array.copy() for name, array in result.update.items()}

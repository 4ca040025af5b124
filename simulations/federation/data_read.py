"""The summary of a run's data: the numbers of rows, and a checksum of some clients' rows.

A resumed run whose task has different data now would mix two data sets: it is refused before anything is trained.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from atoll.ground.printable import count_of
from atoll.parallel.data.rows_read import rows_read
from atoll.protocol.vocabulary import ClientId
from atoll.simulations.populations.facts import name_of
from atoll.simulations.populations.pool import reading
from atoll.task.array_task import ArrayTask
from atoll.task.randomness import data_of, generators_kept
from atoll.task.task import Task

COMPARED = 4
"""Number of clients whose rows are compared, evenly spaced."""

Read = Mapping[str, Any]
"""Summary of the data, in plain JSON values."""


def data_read(
    task: Task | ArrayTask, train: Mapping[ClientId, int], test: Mapping[ClientId, int] | None, seed: int
) -> Read:
    """Return the summary of a run's data.

    Args:
        task: the task of the run; an `ArrayTask` reads its data itself, so only the numbers are known.
        train: the number of training examples of each client.
        test: the number of test examples of each; None: not known.
        seed: the seed of the run, for rows with random numbers.

    Raises:
        Exception: any error of the task's code.
    """
    numbers = sha256()
    for name, number in train.items():
        numbers.update(f"{name} {number} {test.get(name, 0) if test else ''}\n".encode())
    rows: dict[str, Any] = {}
    if isinstance(task, Task):
        names = [*train]
        with generators_kept():
            for name in names[:: max(1, len(names) // COMPARED)][:COMPARED]:
                with reading(name_of(name, "train")):
                    dataset = data_of(task, name, "train")
                    rows[str(name)] = None if dataset is None else rows_read(dataset, seed)
    return {"clients": len(train), "rows": sum(train.values()), "numbers": numbers.hexdigest(), "of_some": rows}


def other_data(before: Read, now: Read) -> str:
    """Return how a run's data differs from the current data, as the end of a sentence; empty: it does not."""
    counts = [f"{count_of(each['rows'], 'row')} of {count_of(each['clients'], 'client')}" for each in (before, now)]
    if counts[0] != counts[1]:
        return f"{counts[0]}, and the task has {counts[1]} now"
    if before["numbers"] != now["numbers"]:
        return f"{counts[0]}, which are divided differently now, or have other test examples"
    changed = [name for name, rows in before["of_some"].items() if rows != now["of_some"].get(name)]
    return f"rows of client {changed[0]} that differ from the task's now" if changed else ""

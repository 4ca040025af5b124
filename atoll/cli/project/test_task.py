"""A test that the task learns: two rounds of federated averaging, in this process."""

from pathlib import Path

import numpy as np

from atoll import Task, load_task
from atoll.task import metrics
from atoll.training.local.training import (
    evaluate,
    initial_parameters,
    load_parameters,
    train_locally,
    update_of,
)


def test_two_rounds_of_federated_averaging_beat_chance() -> None:
    """Train at every site from the global model, and add the mean of the updates, weighted by examples, to it."""
    task = load_task(f"{Path(__file__).with_name('task.py')}:task")
    assert isinstance(task, Task)
    assert task.test_data is not None
    model, parameters = task.model(), initial_parameters(task, seed=0)
    for round_id in (1, 2):
        updates, examples = [], []
        for site in task.sites:
            load_parameters(model, parameters)
            work = train_locally(task, model, task.data(site, "train"), task.local, seed=round_id)
            updates.append(update_of(parameters, model))
            examples.append(work.num_examples)
        for name, values in parameters.items():
            mean = np.average([update[name] for update in updates], axis=0, weights=examples)
            parameters[name] = (values + mean).astype(values.dtype)
    load_parameters(model, parameters)
    accuracy = metrics.values(task.metrics, evaluate(task, model, task.test_data()))["accuracy"]
    assert accuracy is not None
    assert accuracy > 0.5, "ten digits: chance is 0.1"

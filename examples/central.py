"""Centralized training of a task on the pooled data of all its sites, as a baseline for a federated run.

Run it as `python -m examples.central examples/digits.py:task --epochs 24`.
"""

import argparse
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader

from atoll import Task, load_task
from atoll.task import metrics
from atoll.training.local.training import evaluate, make_optimizer


def train_centrally(task: Task, epochs: int, seed: int) -> float:
    """Train for `epochs` epochs, and return the accuracy on the server's test data.

    R rounds of federated training with E local epochs take the steps of R x E epochs here.

    Raises:
        ValueError: the task has no test data.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # more threads do not speed up so small a model, and wait for each other on a busy machine
    model = task.model()
    pooled: ConcatDataset[Any] = ConcatDataset([task.data(site, "train") for site in task.sites])
    batches = DataLoader(pooled, batch_size=task.local.batch_size or len(pooled), shuffle=True)
    optimizer = make_optimizer(task.local, list(model.parameters()))
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    if task.test_data is None:
        raise ValueError("the task has no test_data, on which the accuracy is measured")
    accuracy = metrics.values(task.metrics, evaluate(task, model, task.test_data()))["accuracy"]
    if accuracy is None:
        raise ValueError("the task's test_data is empty")
    return accuracy


def main() -> None:
    """Train, and print the accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", help="module:attribute or path/to/file.py:attribute")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    task = load_task(arguments.task)
    if not isinstance(task, Task):
        parser.error(f"{arguments.task} is an ArrayTask, which trains only federated: name a Task")
    accuracy = train_centrally(task, arguments.epochs, arguments.seed)
    print(f"accuracy {accuracy:.4f} after {arguments.epochs} centralized epochs")


if __name__ == "__main__":
    main()

"""The plain centralized training of a task on the pooled data of all its sites, to compare a federated run with.

Run it as `python -m examples.central examples/digits.py:task --epochs 24`.
"""

import argparse
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader

from atoll import Task, load_task
from atoll.parallel.local_training.training import evaluate, make_optimizer
from atoll.parallel.task import metrics


def train_centrally(task: Task, epochs: int, seed: int) -> float:
    """The accuracy on the server's test data after so many epochs.

    A federated run of R rounds with E local epochs each takes as many steps as R x E epochs here.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # so small a model gains nothing from more, and on a busy machine they wait for each other
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
        raise ValueError("the task has no test_data to measure the accuracy on")
    accuracy = metrics.values(task.metrics, evaluate(task, model, task.test_data()))["accuracy"]
    if accuracy is None:
        raise ValueError("the task's test_data is empty")
    return accuracy


def main() -> None:
    """Train and print one number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", help="module:attribute or path/to/file.py:attribute")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    task = load_task(arguments.task)
    if not isinstance(task, Task):
        parser.error("only a PyTorch task can be trained centrally")
    accuracy = train_centrally(task, arguments.epochs, arguments.seed)
    print(f"accuracy {accuracy:.4f} after {arguments.epochs} centralized epochs")


if __name__ == "__main__":
    main()

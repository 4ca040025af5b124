"""Handwritten digits, trained in the style of Horovod: one process's loop, and five lines that make it data parallel.

    torchrun --nproc-per-node 2 -m examples.horovod_style       or     python -m examples.horovod_style

Each rank takes its share of every batch, so any number of ranks that divides the batch ends with the same accuracy.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import atoll.parallel.communication.horovod as hvd
from examples.digits import SITES, examples, owners

BATCH_SIZE = 48


def make_model() -> nn.Module:
    """64 pixels to 10 digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(epochs: int, compression: str = "none") -> tuple[nn.Module, float]:
    """The model, the same on every rank, and its share of right answers on the test set."""
    torch.manual_seed(hvd.rank())  # each rank has other weights, until rank 0's are everybody's
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(inner, root_rank=0)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression=compression)

    images, targets = examples(np.concatenate([owners()[site] for site in SITES]))
    order = torch.Generator().manual_seed(0)  # one for all: the ranks agree on the batches
    for _ in range(epochs):
        whole = torch.randperm(len(targets), generator=order)
        for batch in whole[: len(whole) // BATCH_SIZE * BATCH_SIZE].split(BATCH_SIZE):
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), targets[mine]).backward()
            optimizer.step()
    return model, accuracy(model)


def accuracy(model: nn.Module) -> float:
    """Each rank looks at its share of the test set."""
    images, targets = examples(owners()["server"][hvd.rank() :: hvd.size()])
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == targets).sum()
    counts = hvd.allreduce(torch.stack([right, torch.tensor(len(targets))]), average=False)
    return (counts[0] / counts[1]).item()


def main() -> None:
    """Train and print one number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--compression", default="none", choices=hvd.WIRES)
    parser.add_argument("--save", type=Path, help="where rank 0 writes the model (safetensors)")
    arguments = parser.parse_args()
    hvd.init()
    if BATCH_SIZE % hvd.size():
        parser.error(f"{hvd.size()} ranks do not divide a batch of {BATCH_SIZE}")
    model, share = train(arguments.epochs, arguments.compression)
    if hvd.rank() == 0:
        print(f"accuracy {share:.4f} after {arguments.epochs} epochs on {hvd.size()} ranks", flush=True)
        if arguments.save:
            save_file(model.state_dict(), arguments.save)
    hvd.shutdown()


if __name__ == "__main__":
    main()

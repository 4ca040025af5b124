"""Data-parallel training in the style of Horovod: the loop of one process, and five lines that make it parallel.

    torchrun --nproc-per-node 2 -m examples.horovod_style
    python -m examples.horovod_style       # the same on one rank

Each rank takes its share of every batch, so the accuracy is the same for any number of ranks that divides the batch.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import examples.teaching.horovod as hvd
from examples.digits import SITES, examples, owners

BATCH_SIZE = 48


def make_model() -> nn.Module:
    """Return a small network: 64 pixels in, 10 digits out."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(epochs: int, compression: str = "none") -> tuple[nn.Module, float]:
    """Train for `epochs` epochs; return the model, equal on all ranks, and its accuracy on the test set."""
    torch.manual_seed(hvd.rank())  # each rank has other weights until the broadcast from rank 0
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(inner, root_rank=0)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression=compression)

    images, targets = examples(np.concatenate([owners()[site] for site in SITES]))
    order = torch.Generator().manual_seed(0)  # one seed for all ranks, so that they agree on the batches
    for _ in range(epochs):
        whole = torch.randperm(len(targets), generator=order)
        for batch in whole[: len(whole) // BATCH_SIZE * BATCH_SIZE].split(BATCH_SIZE):
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), targets[mine]).backward()
            optimizer.step()
    return model, accuracy(model)


def accuracy(model: nn.Module) -> float:
    """Return the accuracy on the test set, of which each rank evaluates a share."""
    images, targets = examples(owners()["server"][hvd.rank() :: hvd.size()])
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == targets).sum()
    counts = hvd.allreduce(torch.stack([right, torch.tensor(len(targets))]), average=False)
    return (counts[0] / counts[1]).item()


def main() -> None:
    """Train, and print the accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--compression", default="none", choices=hvd.WIRES)
    parser.add_argument("--save", type=Path, help="the safetensors file that rank 0 writes")
    arguments = parser.parse_args()
    hvd.init()
    if BATCH_SIZE % hvd.size():
        parser.error(f"{hvd.size()} ranks do not divide a batch of {BATCH_SIZE}: choose a number of ranks that does")
    model, share = train(arguments.epochs, arguments.compression)
    if hvd.rank() == 0:
        print(f"accuracy {share:.4f} after {arguments.epochs} epochs on {hvd.size()} ranks", flush=True)
        if arguments.save:
            save_file(model.state_dict(), arguments.save)
    hvd.shutdown()


if __name__ == "__main__":
    main()

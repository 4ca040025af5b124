"""A small decoder whose training is the same at each attempt, to the bit: for clients that are a mesh, and are killed.

`ATOLL_BENCH_STEPS` is a file to which the first rank of a mesh appends the time of each of its steps [s since 1970] and
its process id, so that the time from a death to the next step can be measured.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.parallel.models.decoder import Decoder, DecoderConfig

SITES, VOCAB, LENGTH, EXAMPLES, BATCH, EPOCHS = ["a", "b", "c"], 2048, 8, 64, 8, 2
STEPS = EXAMPLES // BATCH * EPOCHS


def tokens(site: str, split: str) -> TensorDataset | None:
    """Return random sequences of a site; the target of each token is the next one."""
    if split != "train":
        return None
    drawn = torch.randint(0, VOCAB, (EXAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(ord(site[0])))
    return TensorDataset(drawn[:, :-1], drawn[:, 1:])


def note_the_step() -> None:
    """Append the time of a step and the process id to the file of steps, on the first rank."""
    if (file := os.environ.get("ATOLL_BENCH_STEPS")) and os.environ.get("RANK") == "0":
        with Path(file).open("a") as steps:
            steps.write(f"{time.time()} {os.getpid()}\n")


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a token; note the time on the first rank."""
    note_the_step()
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


task = Task(
    model=lambda: Decoder(DecoderConfig(vocab=VOCAB, dim=64, layers=2, heads=4, sequence=LENGTH)),
    data=tokens,
    loss=loss,
    sites=SITES,
    local=Local(batch_size=BATCH, epochs=EPOCHS, lr=0.01, optimizer="adamw"),
)


class Moves(nn.Module):
    """A matrix that every example moves by a known amount, whatever its values are."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(_num_moved() // MOVED, MOVED))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product of each example with the matrix."""
        return rows @ self.w.flatten()


MOVED, MOVES_AT_ONCE, MOVES_LR = 64, 8, 1 / 64


def _num_moved() -> int:
    return int(os.environ.get("ATOLL_BENCH_ELEMENTS", "64000")) // MOVED * MOVED


def moving(site: str, split: str = "train") -> TensorDataset | None:
    """Return rows of a site, of multiples of 1/8, so that every sum of them is exact; sites have different numbers."""
    if split != "train":
        return None
    drawn = torch.Generator().manual_seed(ord(site[0]))
    count = MOVES_AT_ONCE * (2 + ord(site[0]) % 3)
    rows = torch.randint(-16, 17, (count, _num_moved()), generator=drawn, dtype=torch.int8)
    return TensorDataset(rows.float() / 8, torch.zeros(count))


def moved(site: str) -> tuple[torch.Tensor, int]:
    """Return the update of a site, in each round, and the number of its examples."""
    data = moving(site)
    assert data is not None
    rows = data.tensors[0]
    return (-MOVES_LR / MOVES_AT_ONCE * rows.sum(0)).reshape(-1, MOVED), len(rows)


def loss_of_moves(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean product; note the time on the first rank."""
    note_the_step()
    return outputs.mean()


moves = Task(
    model=Moves,
    data=moving,
    loss=loss_of_moves,
    sites=["a", "b", "c", "d", "e"],
    local=Local(batch_size=MOVES_AT_ONCE, epochs=1, lr=MOVES_LR),
)


class Table(nn.Module):
    """One table of `ATOLL_BENCH_ELEMENTS` numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(int(os.environ.get("ATOLL_BENCH_ELEMENTS", "64000")) // 64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sum of some rows."""
        return self.rows(tokens).sum(dim=(1, 2))


table = Task(
    model=Table,
    data=lambda site, split: TensorDataset(torch.arange(16).reshape(8, 2), torch.ones(8)) if split == "train" else None,
    loss=lambda outputs, targets: (outputs * targets).mean(),
    sites=SITES,
    local=Local(batch_size=8, lr=0.1),
)

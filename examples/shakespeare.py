"""The next character in Shakespeare's plays; every speaking role is an owner, with the size and the words of its own.

    export ATOLL_DATA=...         # the folder in which tinyshakespeare/input.txt lies (docs/data.md)
    atoll population examples/shakespeare.py:task

Source:
    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, section
    3: an embedding of 8, two LSTM layers of 256, windows of 80 characters. Theirs are the complete works: read those
    with the same function from Project Gutenberg's pg100.txt.
"""

from typing import Any

import torch
from torch import nn

from atoll import Local, Task
from atoll.parallel.data.public.folder import data_folder
from atoll.parallel.data.public.shakespeare import read_shakespeare

ROLES = read_shakespeare(data_folder("tinyshakespeare") / "input.txt", sequence=80)
"""Windows of 80 characters of every role with at least two lines: of its first 80 % to train on, of the others to test.
It is read with this file, for the names of the sites are in it."""

CHARACTERS = len(ROLES.characters)


class NextCharacter(nn.Module):
    """Characters (B, S) to logits of the next ones (B, S, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, CHARACTERS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """The logits."""
        hidden, _ = self.lstm(self.embedding(characters))
        logits: torch.Tensor = self.head(hidden)
        return logits


def load_test() -> Any:
    """What all roles hold back, for the server."""
    return ROLES.pooled("test")


def loss(logits: torch.Tensor, characters: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the characters, without the filling of a role's last window."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), characters.flatten(), ignore_index=-100)


def accuracy(logits: torch.Tensor, characters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the next characters are right, of how many."""
    counts = characters >= 0
    return ((logits.argmax(dim=-1) == characters) & counts).sum(), counts.sum()


task = Task(
    model=NextCharacter,
    data=ROLES,
    sites=ROLES.sites,
    loss=loss,
    metrics={"accuracy": accuracy},
    local=Local(epochs=1, batch_size=10, lr=0.8),
    test_data=load_test,
)

"""Prediction of the next character in Shakespeare's plays, where each speaking role is a site.

    export ATOLL_DATA=...         # the folder with tinyshakespeare/input.txt (docs/data.md)
    atoll population examples/shakespeare.py:task

Source:
    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, section
    3: an embedding of 8, two LSTM layers of 256, windows of 80 characters. The paper uses the complete works, which
    the same function reads from Project Gutenberg's pg100.txt.
"""

from typing import Any

import torch
from torch import nn

from atoll import Local, Task
from examples.datasets.folder import data_folder
from examples.datasets.shakespeare import read_shakespeare

ROLES = read_shakespeare(data_folder("tinyshakespeare") / "input.txt", sequence=80)
"""Windows of 80 characters of every role with at least two lines; the first 80 % of its text are for training, the rest
for testing. The text is read when this module is loaded, as it has the names of the sites.
"""

CHARACTERS = len(ROLES.characters)


class NextCharacter(nn.Module):
    """An LSTM from characters (B, S) to logits of the next characters (B, S, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, CHARACTERS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next characters."""
        hidden, _ = self.lstm(self.embedding(characters))
        logits: torch.Tensor = self.head(hidden)
        return logits


def load_test() -> Any:
    """Return the test splits of all roles, as the server's test set."""
    return ROLES.pooled("test")


def loss(logits: torch.Tensor, characters: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over the characters, without the padding of a role's last window."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), characters.flatten(), ignore_index=-100)


def accuracy(logits: torch.Tensor, characters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of correct next characters and of all, without padding."""
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

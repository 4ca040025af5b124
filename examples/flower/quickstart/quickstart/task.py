"""The model, the data and the training, which server and client share."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(nn.Module):
    """A small network with BatchNorm: its running statistics and their counter travel, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (n, 10) scores of (n, 64) images."""
        return self.layers(images)


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return the training and the test data of a partition."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    own = torch.arange(len(images)) % num_partitions == partition_id
    data = TensorDataset(images[own], labels[own])
    num_train = int(0.8 * len(data))
    generator = torch.Generator().manual_seed(42)
    train_data, test_data = random_split(data, [num_train, len(data) - num_train], generator)
    return DataLoader(train_data, batch_size=batch_size, shuffle=True), DataLoader(test_data, batch_size=batch_size)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train a network, and return the mean loss of the last epoch's batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    losses = []
    for _ in range(epochs):
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    net.eval()
    loss, num_right, num_seen = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            scores = net(images)
            loss += nn.functional.cross_entropy(scores, labels, reduction="sum").item()
            num_right += int((scores.argmax(1) == labels).sum())
            num_seen += len(labels)
    return loss / num_seen, num_right / num_seen

"""The batched engine against the sequential one, and the choice of `auto`, for each kind of layer and a custom hook.

    python -m benchmarks.batched [--models gru lstm ..] [--clients 8 100] [--turns N] [--quick]

Every client has 40 examples, and trains one epoch in batches of 10 by plain SGD, in one process of one thread. Both
engines take turns with whole rounds; a figure is the least processor time of its turns, which equals the time on an
idle core. A private setting is DP-SGD (`privacy.unit = "example"`) with samples of 10 rows in the mean. `auto` measures
for itself, as at the start of `atoll simulate`. The bar: for each model and number of
clients, the engine that `auto` chooses takes at most 1.10 times the seconds of the faster one.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Algorithm, Local, Task
from atoll.simulations.engines.batched.batched import Batched
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.choice import Resources, choose
from atoll.simulations.engines.engine import Engine, Job, Training
from atoll.simulations.engines.sequential import Sequential
from atoll.task.arrays import Arrays
from atoll.training.worker.model_bench import ModelBench
from benchmarks.report import Bar, conclude, say

EXAMPLES, BATCH_SIZE, CLASSES = 40, 10, 10
WORST = 1.10
LENGTH = 20
"""Steps of a sequence."""


class OfSequences(nn.Module):
    """A classifier by the last output of a recurrent layer.

    Args:
        layer: maps (n, T, 16) to (n, T, 32), as torch's recurrent layers with the batch first.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, T, 16) to (n, classes)."""
        y: torch.Tensor = self.head(self.layer(x)[0][:, -1])
        return y


class OfWords(nn.Module):
    """A classifier of sentences by torch's transformer layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(32, CLASSES)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Map (n, T) to (n, classes)."""
        y: torch.Tensor = self.head(self.encoder(self.embed(words)).mean(1))
        return y


def normalized_cnn() -> nn.Module:
    """Return a CNN with batch norms, for images (1, 16, 16)."""
    layers: list[nn.Module] = []
    for before, after in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, CLASSES))


class Proximal(Algorithm):
    """FedProx: the gradient of 0.05 |w - w_global|^2 in each step."""

    def gradients(self, client: Any, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the gradients with that of the proximal term."""
        return {name: g + 0.1 * (client.parameters[name] - client.start[name]) for name, g in gradients.items()}


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, the shape of an example's floats (an integer: the length of a sentence), and an algorithm with hooks."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...] | int
    algorithm: Algorithm | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run for the task."""


PRIVATE = {
    "privacy.unit": "example",
    "privacy.sample_rate": BATCH_SIZE / EXAMPLES,
    "privacy.clip_norm": 1.0,
    "privacy.noise_multiplier": 1.0,
    "privacy.delta": 1e-3,
}


def small_cnn() -> nn.Module:
    """Return a CNN without norms, for images (1, 16, 16)."""
    layers: list[nn.Module] = []
    for before, after in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, CLASSES))


SETTINGS = {
    "tiny linear": Setting(lambda: nn.Linear(64, CLASSES), (64,)),
    "large linear": Setting(lambda: nn.Sequential(nn.Tanh(), nn.Linear(2048, 1024), nn.Linear(1024, CLASSES)), (2048,)),
    "mlp": Setting(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)), (64,)),
    "hooked mlp": Setting(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)), (64,), Proximal()
    ),
    "dropout mlp": Setting(
        lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, CLASSES)), (64,)
    ),
    "batchnorm cnn": Setting(normalized_cnn, (1, 16, 16)),
    "gru": Setting(lambda: OfSequences(nn.GRU(16, 32, batch_first=True)), (LENGTH, 16)),
    "lstm": Setting(lambda: OfSequences(nn.LSTM(16, 32, batch_first=True)), (LENGTH, 16)),
    "transformer": Setting(OfWords, LENGTH),
    "private mlp": Setting(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)), (64,), overrides=PRIVATE
    ),
    "private cnn": Setting(small_cnn, (1, 16, 16), overrides=PRIVATE),
}


def training_of(setting: Setting, clients: int) -> Training:
    """Return the training of a number of clients with data of their own."""

    @cache
    def data(site: str, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(int(site))
        targets = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
        if isinstance(setting.shape, int):
            return TensorDataset(torch.randint(100, (EXAMPLES, setting.shape), generator=generator), targets)
        return TensorDataset(torch.randn(EXAMPLES, *setting.shape, generator=generator), targets)

    task = Task(
        model=setting.model,
        data=data,
        sites=[str(number) for number in range(clients)],
        loss=nn.functional.cross_entropy,
        metrics={},
        local=Local(epochs=1, batch_size=BATCH_SIZE, optimizer="sgd", lr=0.05),
        algorithm=setting.algorithm,
    )
    return Training(task=task, overrides=setting.overrides)


def seconds_of(engine: Engine, version: Arrays, jobs: Sequence[Job]) -> float:
    """Return the processor time of a round [s]."""
    began = time.process_time()
    for _ in engine.train(version, jobs):
        pass
    return time.process_time() - began


def measure(name: str, clients: int, turns: int) -> dict[str, Any]:
    """Return the seconds of both engines, and the choice of `auto`."""
    training = training_of(SETTINGS[name], clients)
    assert isinstance(training.task, Task)
    version = ModelBench(training.task, {"local": dict(training.overrides), "algorithm": "fedavg"}).initial(0)
    jobs = [Job(site, seed) for seed, site in enumerate(training.task.sites)]
    engines: dict[str, Engine] = {"sequential": Sequential(training)}
    try:
        engines["batched"] = Batched(training)
    except CannotBatch as error:
        say(f"  {name}: not batched: {error}")
    rounds = [{kind: seconds_of(engine, version, jobs) for kind, engine in engines.items()} for _ in range(1 + turns)]
    least = {kind: min(one[kind] for one in rounds[1:]) for kind in engines}  # the first one warms up
    choice = choose(training, version, training.task.sites, resources=Resources(1), cohort=clients)
    choice.engine.close()
    chosen = "batched" if "batched" in choice.engine.name else "sequential"
    return {
        "seconds": {kind: round(value, 5) for kind, value in least.items()},
        "engine": choice.engine.name,
        "ratio": round(least[chosen] / min(least.values()), 3),
        "times": round(least["sequential"] / least.get("batched", least["sequential"]), 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batched", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--clients", nargs="+", type=int, default=[4, 20, 100])
    parser.add_argument("--turns", type=int, default=5, help="measured rounds of each engine")
    parser.add_argument("--quick", action="store_true", help="two models, 20 clients, two turns")
    given = parser.parse_args(arguments)
    if given.quick:
        given.models, given.clients, given.turns = ["mlp", "gru"], [20], 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for name in given.models:
        for clients in given.clients:
            one = found[f"{name}, {clients} clients"] = measure(name, clients, given.turns)
            seconds = ", ".join(f"{kind} {value:.4f} s" for kind, value in one["seconds"].items())
            say(f"  {name}, {clients} clients: {seconds}; auto: {one['engine']}, times the faster {one['ratio']}")
    bars = [Bar.at_most(f"{what}: auto, times the faster engine", one["ratio"], WORST) for what, one in found.items()]
    return conclude("batched", bars, ours=found, theirs={"sequential": "the same figures"})


if __name__ == "__main__":
    sys.exit(main())

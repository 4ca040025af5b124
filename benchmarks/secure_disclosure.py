"""The disclosure of one client's update of digits, by inversion and by inference of membership: plain, and masked.

    python -m benchmarks.secure_disclosure [--seeds N]

A 64-32-10 net, one step of one client. The inversion gives an image for each unit of the first layer
(`simulations/attacks/inversion.py`); a figure is the mean squared distance between the best of them and the client's
image closest to it, beside that of the mean of all digits, which needs no update. The inference of membership
(`membership.py`) has the client's 16 images and 16 others; a figure is the area under its ROC curve, 0.5 for guessing.
The masked vector is the client's encoded update under one key stream, as between any member and the coordinator.
"""

import argparse
import secrets
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits

from atoll.protocol.vocabulary import Digest
from atoll.simulations.attacks.disclosure import flat, gradient
from atoll.simulations.attacks.inversion import distance, inverted
from atoll.simulations.attacks.membership import auc, scores
from atoll.simulations.secure.encoded_updates import EncodedUpdates
from atoll.task.arrays import layout_of
from atoll.task.task import Task
from atoll.tensors.secure.plan import EncodingPlan
from benchmarks.report import Bar, conclude

TASK = Task(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)),
    data=lambda site, split: None,
    loss=torch.nn.functional.cross_entropy,
)
WEIGHT, BIAS = "0.weight", "0.bias"
NAMES = sorted(["0.weight", "0.bias", "2.weight", "2.bias"])
MEMBERS = 16


class Distances(NamedTuple):
    """Distances of the best images to a client's."""

    plain: float
    masked: float
    mean: float


def measured(seed: int, examples: int, bits: int = 32) -> Distances:
    """Attack the update of one client, plain and masked."""
    images, labels = digits()
    chosen = np.random.default_rng(seed).choice(len(images), examples, replace=False)
    mine = images[chosen]
    update = step(net(seed), mine, labels[chosen])
    seen = masked(update, bits)
    of_plain, of_masked = (
        distance(inverted(np.float64(of[WEIGHT]), np.float64(of[BIAS]), 0.0, 1.0), mine) for of in (update, seen)
    )
    others = np.delete(images, chosen, axis=0)
    return Distances(of_plain, of_masked, distance(others.mean(axis=0, keepdims=True), mine))


def told(seed: int, bits: int = 32) -> tuple[float, float]:
    """Infer which of 32 images a client has; return the area under the ROC curve, plain and masked."""
    images, labels = digits()
    chosen = np.random.default_rng(seed).choice(len(images), 2 * MEMBERS, replace=False)
    mine, model = chosen[:MEMBERS], net(seed)
    update = step(model, images[mine], labels[mine])
    each = np.stack([flat(step(model, images[[one]], labels[[one]], -1.0), NAMES) for one in chosen])
    plain, hidden = (scores(flat(of, NAMES), each) for of in (update, masked(update, bits)))
    return auc(plain[:MEMBERS], plain[MEMBERS:]), auc(hidden[:MEMBERS], hidden[MEMBERS:])


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return all images, with values from 0 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return images / 16.0, labels


def net(seed: int) -> torch.nn.Module:
    """Return the model that all clients train from."""
    torch.manual_seed(seed)
    return TASK.model()


def step(model: torch.nn.Module, images: np.ndarray, labels: np.ndarray, rate: float = 0.3) -> dict[str, np.ndarray]:
    """Return the update of one step on some images."""
    found = gradient(TASK, model, torch.tensor(images, dtype=torch.float32), torch.tensor(labels))
    return {name: -rate * value for name, value in found.items()}


def masked(update: dict[str, np.ndarray], bits: int) -> dict[str, np.ndarray]:
    """Return what a coordinator sees of an update in a session: its words under a key stream, read as floats."""
    layout, streams = layout_of(update), [(secrets.token_bytes(32), 1)]
    plan = EncodingPlan(bits=bits, clip_norm=1.0, exponents=(0,) * len(layout), num_examples=1)
    with tempfile.TemporaryDirectory() as folder:
        updates = EncodedUpdates(Path(folder))
        updates.add(Digest("encoded"), update, layout, plan, secrets.token_bytes(32))
        return updates.seen(updates.mask(Digest("encoded"), 1, streams), plan, layout)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    bars, ours = [], {}
    for examples in (1, 4):
        found = [measured(seed, examples) for seed in range(options.seeds)]
        plain, hidden, mean = (statistics.median(each) for each in zip(*found, strict=True))
        least = min(each.masked / each.mean for each in found)
        bars.append(Bar.at_least(f"{examples} examples: masked vector, distance over that of the mean image", least, 1))
        ours[f"{examples} examples"] = {"plain": plain, "masked": hidden, "mean image": mean}
    areas = [told(seed) for seed in range(options.seeds)]
    plain, hidden = (statistics.mean(each) for each in zip(*areas, strict=True))
    bars.append(Bar.at_most("membership, masked vector: area beyond guessing", abs(hidden - 0.5), 0.1))
    ours["membership"] = {"plain": plain, "masked": hidden}
    return conclude("secure_disclosure", bars, ours=ours, theirs={})


if __name__ == "__main__":
    sys.exit(main())

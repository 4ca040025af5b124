"""What a hosted case left, beside what Flower's own loop left: equal to the bit, or within a tolerance."""

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.flower.app import node_id, read_app
from atoll.task.apps import with_app
from tests.messages.strategies import reference

FOLDER = Path(__file__).parent / "app"
TOLERANCE = 1e-6
NODES = 7
SITES = tuple(f"node-{place}" for place in range(NODES))
BY_THREADS = ("legacy FedAvg", "legacy FedAdam")
"""Cases whose sums are in the order in which threads end: in Flower's own loop as here."""
NOISY = "DifferentialPrivacy", "LocalDpMod"
"""The parts of the names of cases that draw noise."""


@contextmanager
def opened():
    """The app, loaded in this process, and its cases."""
    app = read_app(with_app(str(FOLDER)))
    try:
        app.load(app.serverapp)
        yield app, list(sys.modules["strategies_server"].CASES)
    finally:
        sys.path.remove(str(app.folder))
        for name in ("strategies_server", "strategies_client"):
            sys.modules.pop(name, None)


@contextmanager
def within(folder):
    """The current folder for a block: a case leaves its file there."""
    folder.mkdir(parents=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def by_flower(app, folder, options):
    """Run cases by Flower's own loop."""
    with within(folder):
        config = app.run_config(options)
        reference.run(app.load(app.serverapp), app.load(app.clientapp), list(map(node_id, SITES)), config)


@dataclass
class Row:
    """The comparison of one case."""

    name: str
    is_equal: bool = False
    worst: float = float("inf")
    fault: str = ""
    is_secret: bool = False
    """Its noise is drawn from a secret, which Flower's own loop does not have."""

    @property
    def is_right(self):
        """Whether a case is equal where the order of its sums is certain, and near where threads decide it."""
        if self.is_secret:
            return not self.fault and 0.0 < self.worst < float("inf")
        return not self.fault and (self.is_equal or (self.name in BY_THREADS and self.worst <= TOLERANCE))

    def __str__(self):
        if self.is_secret and not self.fault:
            return f"{self.name:48}but for its noise, which is secret"
        told = "to the bit" if self.is_equal else f"within {self.worst:.0e}"
        return f"{self.name:48}{self.fault or told}"


def row(name, hosted, theirs, *, has_secret=False):
    """Compare the files of a case in two folders; `has_secret`: the first are those of real processes."""
    for folder in (hosted, theirs):
        if (failed := folder / f"{name}.failed").exists():
            return Row(name, fault=f"FAILED in {folder.name}: {failed.read_text()}")
        if not (folder / f"{name}.npz").exists():
            return Row(name, fault=f"MISSING in {folder.name}")
    ours, right = np.load(hosted / f"{name}.npz"), np.load(theirs / f"{name}.npz")
    if {key: (ours[key].shape, ours[key].dtype) for key in ours} != {
        key: (right[key].shape, right[key].dtype) for key in right
    }:
        return Row(name, fault="WRONG: other values than in Flower's loop, by name, shape or dtype")
    worst = max(distance(ours[key], right[key]) for key in right)
    return Row(name, all(ours[key].tobytes() == right[key].tobytes() for key in right), worst,
               is_secret=has_secret and any(part in name for part in NOISY))  # fmt: skip


def distance(found, expected):
    """|found - expected| / |expected|, of all elements of an array."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    return float(np.linalg.norm(found - expected) / (np.linalg.norm(expected) or 1.0))

"""One cell of the table: a task in one way to run it, and its verdict."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import nn

from atoll import Task
from atoll.parallel.engine.blueprint import blueprint_of
from tests.odd_tasks import plain

Answer = tuple[int, str]
"""Exit code and standard error."""

TRAIN = ("train", "--device", "cpu", "--set", "train.eval_every=9")
SIMULATE = ("simulate", "--rounds", plain.ROUNDS, "--set", "round.cohort_size=3", "--set", "simulation.workers=1")
RANKS = ("--nproc", 2, "--set", "train.batch_size=24")

WAYS: dict[str, tuple[Any, ...]] = {
    "train": TRAIN,
    "dp=2": (*TRAIN, *RANKS, "--mesh", "dp=2"),
    "accumulate": (*TRAIN, "--set", "plan.accumulate=2"),
    "zero=3": (*TRAIN, *RANKS, "--mesh", "dp=2", "--zero", 3),
    "pp=2": (*TRAIN, *RANKS, "--mesh", "pp=2"),
    "workers": (*TRAIN, "--set", "train.workers=2"),
    "sequential": (*SIMULATE, "--engine", "sequential"),
    "processes": (*SIMULATE, "--engine", "processes"),
    "batched": (*SIMULATE, "--engine", "batched"),
}
"""Commands by the name of the way; `agents` is a way of its own."""

CENTRAL = ("train", "dp=2", "accumulate", "zero=3", "pp=2", "workers")
DIVIDED = {"accumulate": (1, 2), "dp=2": (2, 1), "zero=3": (2, 1), "pp=2": (1, 4)}
"""Ranks, and the micro-batches of each, of the ways in which a step is several forward passes."""

TOLERANCE = 2e-5
"""Largest difference from the plain loop, absolute and of the value: rounding of a few steps in float32."""


IN_BF16 = 2e-2
"""The same for a model that computes in bfloat16, which has 8 digits."""


def _parameters(task: Any) -> list[nn.Parameter]:
    return list(task.model().parameters()) if isinstance(task, Task) else []


@dataclass(frozen=True)
class Verdict:
    """The outcome of a cell: "equal", "refused" or "WRONG", with its sentence."""

    word: str
    sentence: str = ""

    def __str__(self) -> str:
        return f"{self.word} {self.sentence}".strip()


def judge(
    task: Any, way: str, answer: Answer, out: Path, pattern: str = "**/*.safetensors", *, by_pass: bool = False
) -> Verdict:
    """Return the verdict on an answer, and on the model that it has left in a folder; `by_pass` as of `compare`."""
    code, stderr = answer
    if code == 0:
        return compare(task, way, newest(out, pattern), by_pass=by_pass)
    lines = [line.removeprefix("atoll: ") for line in stderr.splitlines() if line.startswith("atoll: ")]
    if code != 2 or "Traceback" in stderr or not lines:
        return Verdict("WRONG", f"exit {code}: {' '.join(stderr.split())[-300:]}")
    if "step 1" in stderr or "round 1" in stderr or len(list(out.glob("**/*.safetensors"))) > 1:
        return Verdict("WRONG", f"refused after the first step: {lines[0]}")
    return Verdict("refused", "; ".join(lines))


def newest(out: Path, pattern: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of the last file of a pattern."""
    return load_file(sorted(out.glob(pattern))[-1])


def compare(task: Any, way: str, found: dict[str, np.ndarray[Any, Any]], *, by_pass: bool = False) -> Verdict:
    """Return whether a model is that of the plain loop.

    Args:
        task: the task.
        way: the way in which it ran.
        found: the model.
        by_pass: its forward pass depends on the rows that are in it, so that the loop divides each step, too.
    """
    if not isinstance(task, Task):
        rows = [task.train(task.initial(0), _Site(site)) for site in task.sites]
        total = sum(trained.num_examples for trained in rows)
        right: dict[str, Any] = {
            name: sum(np.asarray(t.update[name], float) * t.num_examples for t in rows) / total for name in found
        }
    else:
        state = plain.central(task) if way in CENTRAL else plain.federated(task)
        if by_pass and way in DIVIDED:
            state = plain.divided(task, *DIVIDED[way])
        right = {name: tensor.numpy() for name, tensor in state.items()}
    if missing := [name for name in right if name not in found and not _is_tied(task, name, right, found)]:
        return Verdict("WRONG", f"without {', '.join(missing)}")
    for name, value in found.items():
        difference = np.abs(value.astype(float) - right[name].astype(float)).max(initial=0.0)
        tolerance = IN_BF16 if any(p.dtype == torch.bfloat16 for p in _parameters(task)) else TOLERANCE
        if not difference <= tolerance * max(1.0, np.abs(right[name].astype(float)).max(initial=0.0)):
            return Verdict("WRONG", f"{name} differs by {difference:.2e}")
    return Verdict("equal")


@dataclass(frozen=True)
class _Site:
    """Instructions of which an array task reads the site alone."""

    site: str


def _is_tied(task: Task, name: str, right: dict[str, Any], found: dict[str, Any]) -> bool:
    """Return whether a tensor without a place of its own has the memory of one that is there."""
    places = {key: tensor.data_ptr() for key, tensor in plain.fresh(task).state_dict().items()}
    return any(places[name] == places[other] for other in found)


def has_chain(task: Any) -> bool:
    """Return whether a pipeline can cut the task's model."""
    model = task.model() if isinstance(task, Task) else None
    return isinstance(model, nn.Module) and bool(blueprint_of(model).chain)


Run = Callable[..., Answer]
"""(arguments) -> exit code and standard error."""


def cell(task: Any, reference: str, way: str, folder: Path, run: Run, *, by_pass: bool = False) -> Verdict:
    """Run a task in one way that is a command; `by_pass` as of `compare`."""
    command, *options = WAYS[way]
    out = folder / way
    pattern = "model.safetensors" if command == "train" else f"models/versions/{plain.ROUNDS:06d}.safetensors"
    return judge(task, way, run(command, reference, *options, "--out", out), out, pattern, by_pass=by_pass)

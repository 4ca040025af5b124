"""Canary clients over the fold of a private run: each has an update of a single value, and is in by chance.

Canary i sends `LONG` clip norms in the direction e_i, which clipping shortens to C e_i, and takes part with
probability 1/2. Two versions are folded by the coordinator's plan, clipping, sum and noise:

    release 1   the canaries that are in
    release 2   one update of zeros, so that it has noise alone

    score of a canary    its value in release 1; and its value in release 1 less the one in release 2, which is without
                         noise if both have the same

The values of all canaries are elements of the task's own tensors, as far as the canaries need them: a fold adds tensor
by tensor, and an update without these is none of the audit. The noise follows from a public seed, as in a simulation:
the adversary of the audit does not use it.

Source: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), section 6; Andrew et al. 2024 (arXiv 2302.03098) for clients.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atoll.protocol.privacy.one_run_audit import SURE, Score
from atoll.protocol.vocabulary import ClientId, RoundId, Version
from atoll.server.config.aggregation import OptimizerConfig
from atoll.server.config.model import ModelConfig
from atoll.server.config.run import RunConfig
from atoll.server.rounds.events import Aggregate, Contribution
from atoll.simulations.federation.models import Models
from atoll.simulations.federation.updates import Updates
from atoll.task.array_task import Instructions
from atoll.task.arrays import Arrays
from atoll.tensors.layout import FLOATS, Layout
from atoll.training.worker.benches import bench_of

LONG = 10.0
"""Length of a canary's update, in clip norms."""

ALONE, DIFFERENCE = "value of the sum", "difference of two sums"


def draw(number: int, rng: random.Random) -> list[bool]:
    """Return whether each canary is in, with probability 1/2 each."""
    return [rng.random() < 0.5 for _ in range(number)]


def scores_of_clients(config: RunConfig, layout: Layout, is_in: Sequence[bool], folder: Path) -> tuple[Score, ...]:
    """Fold the canaries that are in, then none, and return the scores of all.

    Args:
        config: the settings of a run with `[privacy]`.
        layout: the model's tensors, with at least as many values as there are canaries.
        is_in: whether each canary is in; at least one is.
        folder: an empty folder.

    Raises:
        ConfigError: the model does not go with the settings.
    """
    places = _places(layout, len(is_in))
    plain = {"optimizer": OptimizerConfig(), "model": ModelConfig()}
    models = Models(folder / "models", config.model_copy(update=plain), bench_of(_Zeros(places), {}), threads=1)
    updates = Updates(folder / "updates", models.row_layout)
    privacy = config.rules.privacy
    assert privacy is not None
    canaries = [(f"canary-{i:06}", i) for i, taken in enumerate(is_in) if taken]
    first = _fold(models, updates, 1, [(name, _canary(places, i, LONG * privacy.clip_norm)) for name, i in canaries])
    second = _fold(models, updates, 2, [("zeros", _zeros(places))])
    scale = config.round.cohort_size / privacy.clip_norm
    release, other = first * scale, (second - first) * scale
    return (
        Score(ALONE, release.tolist()),
        Score(DIFFERENCE, (release - other).tolist(), SURE),
    )


def _fold(models: Models, updates: Updates, number: int, of_clients: list[tuple[str, Arrays]]) -> Any:
    contributions = []
    for name, update in of_clients:
        client = ClientId(name)
        digest = updates.digest_of(client, RoundId(number), None)
        updates.add(digest, update, {})
        contributions.append(Contribution(client, digest, 1, 1.0))
    effect = Aggregate(RoundId(number), Version(number - 1), tuple(contributions))
    arrays = models.arrays(models.fold(effect, updates))
    return np.concatenate([arrays[name].ravel() for name in sorted(arrays)]).astype(np.float64)


def _places(layout: Layout, number: int) -> dict[str, int]:
    """Return the tensors with the number of their values that the canaries have, in the order of the scores."""
    places: dict[str, int] = {}
    for tensor in sorted(layout, key=lambda tensor: tensor.name):
        if tensor.dtype in FLOATS and (taken := min(tensor.num_elements, number - sum(places.values()))) > 0:
            places[tensor.name] = taken
    return places


def _zeros(places: dict[str, int]) -> Arrays:
    return {name: np.zeros(size, np.float32) for name, size in places.items()}


def _canary(places: dict[str, int], number: int, length: float) -> Arrays:
    update, start = _zeros(places), 0
    for name, size in places.items():
        if start <= number < start + size:
            update[name][number - start] = length
        start += size
    return update


class _Zeros:
    """The task of a model of zeros, without a training."""

    sites = ("none",)

    def __init__(self, places: dict[str, int]) -> None:
        self._places = places

    def initial(self, seed: int) -> Arrays:
        return _zeros(self._places)

    def train(self, parameters: Arrays, instructions: Instructions) -> Any:
        raise AssertionError("an audit trains nothing")

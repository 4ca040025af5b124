"""Canary examples of a private training: rows of the task's own data, each in by chance and with another one's targets.

A row with the targets of another canary of its site is not explained by the others, so that a model which has not seen
it has a large loss, and its gradient differs from theirs. Rows that are no pairs of inputs and targets, or whose
targets have other shapes, keep their own. Two scores of a canary, from the first and the last weights alone:

    loss         of the row before the training, less the loss after it
    gradient     cos(w_0 - w_T, gradient of the row at w_0 + gradient at w_T): the part of the row in the change

Source: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), section 6; the gradient as in
`simulations/attacks/membership`.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from atoll.parallel.trainer.data import data_of_sites
from atoll.parallel.trainer.job import Job
from atoll.task.collated import Collated
from atoll.task.randomness import data_of, generators_kept
from atoll.task.task import Task
from atoll.training.data.batches import row_at, to_device
from atoll.training.data.draws import drawing
from atoll.training.model.parameters import build_model
from atoll.training.trials.contract import one_loss

MODEL = "model.safetensors"
LOSS, GRADIENT = "loss of the row", "gradient of the row"

Place = tuple[str, int]
"""A site, and the number of a row in its training data."""


@dataclass(frozen=True, slots=True)
class Canaries:
    """The canaries of one training.

    Attributes:
        rows: where they are.
        targets: the number of the row of the same site that has each one's targets.
        is_in: whether each is in the training.
    """

    rows: tuple[Place, ...]
    targets: tuple[int, ...]
    is_in: tuple[bool, ...]

    @classmethod
    def draw(cls, task: Task, most: int, rng: random.Random) -> "Canaries":
        """Draw at most `most` canaries, and at most half of the rows, each in with probability 1/2."""
        of_sites = data_of_sites(task, "train")
        rows = [(site, row) for site, data in of_sites.items() for row in range(len(data))]
        chosen = sorted(rng.sample(rows, min(most, len(rows) // 2)))
        by_place: dict[Place, int] = {}
        for site, data in of_sites.items():
            of_site = [row for where, row in chosen if where == site]
            shifted = of_site[1:] + of_site[:1]
            fit = bool(of_site) and _are_alike([row_at(data, row) for row in of_site])
            by_place |= zip(((site, row) for row in of_site), shifted if fit else of_site, strict=True)
        is_in = tuple(rng.random() < 0.5 for _ in chosen)
        return cls(tuple(chosen), tuple(by_place[place] for place in chosen), is_in)

    def task(self, task: Task) -> Task:
        """Return the task whose sites have the canaries that are in, and lack the others."""
        return replace(task, data=_Data(task, self))

    def of_site(self, site: str) -> dict[int, tuple[int, bool]]:
        """Return the rows of a site's canaries, each with the row of its targets and whether it is in."""
        every = zip(self.rows, self.targets, self.is_in, strict=True)
        return {row: (target, taken) for (where, row), target, taken in every if where == site}


def scores_of_examples(job: Job, canaries: Canaries, folder: Path, device: torch.device) -> Mapping[str, list[float]]:
    """Return the scores of the canaries after the training of `canaries.task` in a folder, by the scores' names.

    Args:
        job: the job, with the task of before.
        canaries: in the order of the scores.
        folder: of the training, which has ended.
        device: of the passes.
    """
    with generators_kept():
        first, last = (build_model(job.task, job.config.seed).to(device).eval() for _ in range(2))
        if job.config.start is not None:
            first.load_state_dict(load_file(job.config.start), strict=False)
        last.load_state_dict(load_file(folder / MODEL), strict=False)
        before = {name: p.detach().clone() for name, p in first.named_parameters() if p.requires_grad}
        change = {name: before[name] - p.detach() for name, p in last.named_parameters() if name in before}
        length = _norm(change)
        found: dict[str, list[float]] = {LOSS: [], GRADIENT: []}
        for inputs, targets in _rows(job, canaries, device):
            of_first, of_last = (_loss_and_gradient(model, job.task, inputs, targets) for model in (first, last))
            both = {name: of_first[1][name] + of_last[1][name] for name in change}
            inner = sum(float((change[name].double() * both[name].double()).sum()) for name in change)
            found[LOSS].append(of_first[0] - of_last[0])
            found[GRADIENT].append(inner / max(length * _norm(both), torch.finfo(torch.float64).tiny))
    return found


def _rows(job: Job, canaries: Canaries, device: torch.device) -> Any:
    fetches = {
        site: drawing(_rows_of(data, canaries.of_site(site)), job.config.seed)
        for site, data in data_of_sites(job.task, "train").items()
    }
    for site, row in canaries.rows:
        yield to_device(fetches[site](0, torch.tensor([row])), device)


def _loss_and_gradient(
    model: nn.Module, task: Task, inputs: Any, targets: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = one_loss(task.loss(model(inputs), targets))
    found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
    gradients = zip(trained.items(), found, strict=True)
    return float(loss.detach()), {name: torch.zeros_like(p) if g is None else g for (name, p), g in gradients}


def _norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def _are_alike(rows: Sequence[Any]) -> bool:
    """Return whether rows are pairs whose second parts may be exchanged."""
    if not all(isinstance(row, tuple | list) and len(row) == 2 for row in rows):
        return False
    return len({(type(target), getattr(target, "shape", None)) for _, target in rows}) == 1


@dataclass(frozen=True, slots=True)
class _Data:
    """`Task.data` with the canaries that are in, and without the others."""

    task: Task
    canaries: Canaries

    def __call__(self, site: str, split: str) -> Any:
        data = data_of(self.task, site, split)
        if data is None or split != "train":
            return data
        of_site = self.canaries.of_site(site)
        kept = [row for row in range(len(data)) if row not in of_site or of_site[row][1]]
        return _rows_of(data, of_site, kept)


def _rows_of(data: Any, of_site: Mapping[int, tuple[int, bool]], kept: Sequence[int] | None = None) -> Any:
    """Return rows of a site, `kept` or all, of which the canaries have their targets."""
    targets = {row: target for row, (target, _) in of_site.items()}
    if isinstance(data, Collated):
        return Collated(_Rows(data.dataset, targets, kept), data.collate)
    return _Rows(data, targets, kept)


class _Rows:
    """Rows of a data set, some of them with the targets of other rows.

    Args:
        data: map-style.
        targets: by row, the row of its targets.
        kept: the rows; None: all.
    """

    def __init__(self, data: Any, targets: Mapping[int, int], kept: Sequence[int] | None = None) -> None:
        self._data, self._targets, self._kept = data, targets, range(len(data)) if kept is None else kept

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, number: int) -> Any:
        row = self._kept[number]
        found, other = row_at(self._data, row), self._targets.get(row, row)
        return found if other == row else (found[0], row_at(self._data, other)[1])

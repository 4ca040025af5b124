"""The pooled data of a task: the data of all its sites, in one place."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import ConcatDataset, TensorDataset

from atoll.ground.printable import some_of
from atoll.parallel.data.loader import Loader
from atoll.parallel.data.order import Order
from atoll.parallel.engine.passes import casting
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trainer.evaluation import readable
from atoll.task.context import context_of
from atoll.task.errors import TaskBroken
from atoll.task.randomness import data_of, server_data_of
from atoll.task.task import Task
from atoll.training.data.draws import Steady
from atoll.training.data.row_forms import kind_of
from atoll.training.trials.first_batch import Batches, Rows, first_batch, sites_by_kind
from atoll.training.trials.trial import refuse

NAMES_MAX = 4
"""Sites that a sentence names."""

SiteData = Mapping[str, Any]
"""The data sets of one split by the sites that have some."""


def data_of_sites(task: Task, split: str) -> SiteData:
    """Return the data of all sites that have examples of a split, "train" or "test"."""
    found = {site: data_of(task, site, split) for site in task.sites}
    return {site: data for site, data in found.items() if data is not None and len(data)}


def pooled(of_sites: SiteData) -> Any | None:
    """Return the data of all sites, one after another; None if no site has any."""
    found = list(of_sites.values())
    if not found:
        return None
    are_tensors = all(type(data) is TensorDataset for data in found)
    if are_tensors and len({kind_of(data, reads=False) for data in found}) == 1:  # one index operation reads a batch
        return TensorDataset(*(torch.cat(columns) for columns in zip(*(data.tensors for data in found), strict=True)))
    return ConcatDataset(found)


@dataclass(frozen=True, slots=True)
class Data:
    """The data of a centralized training: pooled training data, and data for evaluations."""

    train: Any
    """The sites' training data, pooled."""
    tests: Mapping[str, Any]
    """The data for evaluations: `sites`, the sites' test data pooled, and `test`, the task's, as far as there are
    any."""


def data_for(
    task: Task,
    plan: Plan,
    *,
    seed: int,
    device: torch.device,
    at_once: int | None,
    evaluated_at_once: int | None = None,
) -> Data:
    """Return the data of a training, after a trial of a batch of each kind of rows.

    Args:
        task: the task with its sites.
        plan: the plan of the training.
        seed: the seed of the training.
        device: the device of this rank.
        at_once: examples of a batch; None: any number.
        evaluated_at_once: examples of a batch of an evaluation; None: as in the training.

    Raises:
        TaskBroken: there is none to train on; the task's test data has no examples, as a simulated or deployed run
            refuses it; or the model, the loss or a metric cannot take a batch.
    """
    train, test = data_of_sites(task, "train"), data_of_sites(task, "test")
    if not train:
        raise TaskBroken(f"none of the sites {', '.join(task.sites)} has data to train on")
    own = server_data_of(task)
    if own is not None and not len(own):
        raise TaskBroken("the task's test_data has no examples: give it some, or leave test_data out")
    context, evaluated = context_of(task, seed=seed), evaluated_at_once or at_once
    trained = _of_kinds(train, Rows(data=None, where="train", context=context, is_trained=True, at_once=at_once))
    tested = _of_kinds(test, Rows(data=None, where="test", context=context, at_once=evaluated))
    every = (
        trained
        + tested
        + ([] if own is None else [Rows(data=own, where="task.test_data()", context=context, at_once=evaluated)])
    )
    cast = partial(casting, plan, device)
    refuse([first_batch], Batches(task=task, every=every, seed=seed, device=device, casting=cast, reading=readable))
    found = {"sites": _whole(test, tested), "test": own}
    return Data(_whole(train, trained), {name: data for name, data in found.items() if data is not None})


def _whole(of_sites: SiteData, kinds: list[Rows]) -> Any | None:
    """Return the pooled data of all sites; if all have one kind of rows, they are pooled already."""
    return kinds[0].data if len(kinds) == 1 else pooled(of_sites)


def _of_kinds(data: SiteData, like: Rows) -> list[Rows]:
    """Return the pooled rows of the sites of each kind."""
    return [
        replace(
            like,
            data=pooled({site: data[site] for site in sites}),
            where=f"the {like.where} data of {'site' if len(sites) == 1 else 'sites'} {_names(sites)}",
        )
        for sites in sites_by_kind(data)
    ]


def in_order(data: Any, *, batch_size: int, num_ranks: int, rank: int, device: torch.device) -> Loader:
    """Return a loader of every example once, with the same number of batches on each rank.

    If the data set draws random numbers, they are the same in every epoch.
    """
    order = Order(num_examples=len(data), batch_size=max(batch_size, num_ranks), num_ranks=num_ranks, shuffle=False)
    return Loader(Steady(data), order, rank=rank, device=device)


def _names(sites: list[str]) -> str:
    return some_of(map(repr, sites), NAMES_MAX)

"""Whether many clients in one product come to what each comes to alone: a few of them are trained both ways.

So what cannot be batched (an operation without a rule, examples that see each other, randomness in the forward) is
found before it counts, with its reason.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, cycle, islice
from typing import Any, Protocol

import numpy as np
import torch

from atoll.parallel.task.arrays import Arrays
from atoll.parallel.task.task import Task
from atoll.parallel.worker.model_bench import ModelBench
from atoll.simulations.engines.batched.beside import of_one_kind, taken_out
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.engine import Failed, Job, Trained, Training
from atoll.simulations.engines.examples import Examples
from atoll.simulations.engines.loop import Loop, orders, seed_everything
from atoll.simulations.engines.rows import Rows

Array = np.ndarray[Any, Any]

KINDS = ("by hand", "stacked", "mapped")
"""Of net, in the order in which they are tried."""

AGREE = 1e-3
"""How far, relative to its length, an update may be from the sequential one before it is a fault and not rounding."""

TRIED = 4
"""Clients that are trained both ways, in one product."""

logger = logging.getLogger(__name__)

LOUD = 1000.0
"""Times as large as its own are one client's inputs once: no other client's update may hear of it."""

TRIES = 3
"""Of so many clients each, until one of them has an update to compare."""


class Probed(Protocol):
    """Trains clients in one product, with whatever kind of net it is given."""

    @property
    def at_once(self) -> int:
        """Clients in a product."""
        ...

    def take(self, kind: str) -> None:
        """Compute with a net of this kind; raises CannotBatch when it cannot take the model."""
        ...

    def begin(self, version: Arrays) -> None:
        """Take the version that the next clients train from."""
        ...

    def product(
        self, chosen: Sequence[int], jobs: Sequence[Job], found: Sequence[Examples], rows: Rows
    ) -> dict[int, Trained | Failed]:
        """Train the clients of some jobs, all at once; their results by index."""
        ...


class Probe:
    """Tries kinds of net.

    Args:
        trainer: that is given them.
        training: of all clients.
        loop: that trains one client alone, from the version that the trainer begins with.
        resting: what no optimizer moves.
    """

    def __init__(self, trainer: Probed, training: Training, loop: Loop, resting: Sequence[str]) -> None:
        assert isinstance(training.task, Task)
        self._training, self._task, self._local = training, training.task, training.local
        self._trainer, self._loop, self._resting = trainer, loop, resting

    def choose_kind(self) -> None:
        """Give the trainer the first kind of net that takes the model and agrees.

        Raises:
            CannotBatch: none does, with every reason.
        """
        reasons = []
        for kind in KINDS:
            try:
                self._trainer.take(kind)
                self._check()
                return
            except CannotBatch as error:
                reasons.append(f"{kind}: {error}")
            except Exception as error:
                reasons.append(f"{kind}: {str(error).strip() or type(error).__name__}")
        raise CannotBatch("; ".join(reasons))

    def _check(self) -> None:
        """Train the first few clients both ways; where all of them fail both ways, the next few.

        Raises:
            CannotBatch: the results differ, or there is none to compare.
        """
        request = {"local": dict(self._training.overrides), "algorithm": self._training.algorithm}
        self._trainer.begin(ModelBench(self._task, request).initial(0))
        sites = cycle(self._task.sites)
        if not any(self._agrees_on(list(islice(sites, min(TRIED, self._trainer.at_once)))) for _ in range(TRIES)):
            raise CannotBatch("every client that was tried leaves the finite numbers: there is nothing to compare")

    def _agrees_on(self, sites: Sequence[str]) -> bool:
        """Whether the results of these clients are the same; not, where there is none to compare.

        Raises:
            CannotBatch: they differ.
        """
        every = [self._loop.examples(site) for site in sites]
        chosen = sorted(of_one_kind(every), key=lambda index: -every[index].count)
        if not chosen:
            raise CannotBatch("the task names no sites with examples in tensors to try it with")
        found = [_telling(every[index], self._local.batch_size, number) for number, index in enumerate(chosen)]
        seeds = [self._telling_seed(examples, number) for number, examples in enumerate(found)]
        jobs = [Job(sites[index], seed) for index, seed in zip(chosen, seeds, strict=True)]
        rows, alone = Rows(self._loop.form, len(jobs)), Rows(self._loop.form, len(jobs))
        results = self._trainer.product(range(len(jobs)), jobs, found, rows)
        compared = []
        for index, (job, examples) in enumerate(zip(jobs, found, strict=True)):
            theirs = self._loop.one(job, alone, index, examples)
            kept = self._loop.exchange.own_of(job)[0]
            compared.append(_compare(results[index], theirs, self._resting, kept))
        self._check_apart(jobs, found, results)
        return any(compared[1:] or compared)  # the first one's batches are full, and so tell less

    def _check_apart(
        self, jobs: Sequence[Job], found: Sequence[Examples], results: dict[int, Trained | Failed]
    ) -> None:
        """Train the same clients while the last of them has far larger inputs, which may cross any threshold.

        Raises:
            CannotBatch: another one's update has changed.
        """
        *others, last = found
        if not others or (loud := _loud(last)) is None:
            return
        try:
            again = self._trainer.product(range(len(jobs)), jobs, [*others, loud], Rows(self._loop.form, len(jobs)))
        except CannotBatch:
            raise
        except Exception as error:  # not every model takes such numbers: as indices they point beyond its tables
            logger.debug("loud examples are none for this model: %s", error)
            return
        for index in range(len(others)):
            try:
                _compare(again[index], results[index], (), self._loop.exchange.own_of(jobs[index])[0])
            except CannotBatch as error:
                raise CannotBatch(f"what {jobs[-1].client_id} trains on reaches others: {error}") from None

    def _telling_seed(self, examples: Examples, number: int) -> int:
        """One with which the first example is in the first batch, so that it only fills the second one up."""
        generator = torch.Generator() if self._local.shuffle else None
        for seed in count(number, TRIED):
            seed_everything(seed)
            if 0 in next(orders(examples.count, 1, generator))[: self._local.batch_size]:
                break
        return seed


def _telling(examples: Examples, batch_size: int | None, number: int) -> Examples:
    """A few of a client's examples, by which it shows when they see each other, or those of other clients.

    Two batches of the first client, one and a few examples more of the others: their second ones are filled up. Floats
    are of other sizes for each client, and the largest in its first example, which is what they are filled up with.
    """
    size = batch_size or examples.count
    most = examples.count if examples.count > size else max(1, examples.count - number)
    taken = min(most, size + number if number else 2 * size)
    inputs, *others = taken_out(replace(examples, chosen=examples.rows(torch.arange(taken)))).tensors or ()
    if inputs.is_floating_point():
        scales = inputs.new_full((taken, *(1 for _ in inputs.shape[1:])), 0.8 * 0.6**number)
        scales[0] = 0.6**number
        inputs = inputs * scales
    return replace(examples, count=taken, tensors=(inputs, *others), chosen=None)


def _loud(examples: Examples) -> Examples | None:
    """The same examples, every other one negative; None where they are no floats."""
    inputs, *others = examples.tensors or ()
    if not inputs.is_floating_point():
        return None
    signs = torch.where(torch.arange(len(inputs), device=inputs.device) % 2 == 0, LOUD, -LOUD).to(inputs.dtype)
    shaped = signs.view(-1, *(1 for _ in inputs.shape[1:]))
    return replace(examples, tensors=(inputs * shaped, *others))


def _compare(ours: Trained | Failed, theirs: Trained | Failed, resting: Sequence[str], kept: Arrays) -> bool:
    """Whether there is something to compare.

    Args:
        ours: of the product.
        theirs: of the same client alone.
        resting: what no optimizer moves.
        kept: the layers of its own that the client began with.

    Raises:
        CannotBatch: it differs.
    """
    if isinstance(ours, Failed) and isinstance(theirs, Failed):
        return False
    if isinstance(ours, Failed) or isinstance(theirs, Failed):
        way = "in the product" if isinstance(ours, Failed) else "alone"
        raise CannotBatch(f"{ours.client_id} leaves the finite numbers {way} only")
    for name in resting:
        if not np.array_equal(ours.update[name], theirs.update[name]):
            raise CannotBatch(f"{name} changes while a client trains, and no optimizer moves it")
    moved, expected = _moved(ours, kept), _moved(theirs, kept)
    distance, length = np.linalg.norm(moved - expected), np.linalg.norm(expected)
    if not distance <= AGREE * length:
        raise CannotBatch(f"the update of {ours.client_id} is {distance / length:.1e} off, relative to its length")
    return True


def _moved(result: Trained, kept: Arrays) -> Array:
    """All floats of a result: what it sends, and what has changed of what stays."""
    floats = [array for array in result.update.values() if array.dtype == np.float32]
    floats += [array - kept.get(name, 0) for name, array in result.own.items()]
    return np.concatenate([array.ravel() for array in floats], dtype=np.float64)  # whose squares stay finite

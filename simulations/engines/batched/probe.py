"""The check that clients get the same results as one group as alone: a few of them are trained both ways.

It finds models that cannot be batched (an operation without a rule, examples that influence each other, randomness
other than dropout) before the first round, with the reason. The hooks of a custom algorithm are tried in two rounds,
the second with the state and the shared tensors of the first.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, cycle, islice
from typing import Any, Protocol

import numpy as np
import torch

from atoll.simulations.engines.batched.concatenation import of_one_kind, taken_out
from atoll.simulations.engines.batched.hooks import WAY_OUT, HookRefused
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.engine import Failed, Job, Trained, Training
from atoll.simulations.engines.examples import Examples
from atoll.simulations.engines.loop import Loop, orders
from atoll.simulations.engines.rows import Rows
from atoll.task.arrays import Arrays
from atoll.task.randomness import seed_everything
from atoll.task.task import Task
from atoll.tensors.layout import SHARED, STATE
from atoll.training.worker.model_bench import ModelBench

Array = np.ndarray[Any, Any]

KINDS = ("by hand", "stacked", "mapped")
"""Kinds of net, in the order of the trials."""

TOLERANCE = 1e-3
"""Maximum distance of an update from the sequential one, relative to its length, that counts as rounding."""

NOISE = 1e-5
"""Maximum distance of a tensor of an algorithm, relative to the whole result, that counts as rounding."""

TRIED = 4
"""Number of clients that are trained both ways, as one group."""

logger = logging.getLogger(__name__)

LOUD = 1000.0
"""Factor of one client's inputs in the check that they do not influence other clients' updates."""

TRIES = 3
"""Maximum number of groups of clients that are tried until one has an update to compare."""


class Probed(Protocol):
    """Trainer of clients as one group, with any kind of net."""

    @property
    def at_once(self) -> int:
        """The number of clients in a group."""
        ...

    def take(self, kind: str) -> None:
        """Compute with a net of this kind; raise CannotBatch if it does not support the model."""
        ...

    def begin(self, version: Arrays, number: int = 0) -> None:
        """Take the version that the next clients train from, and its number."""
        ...

    def product(
        self, chosen: Sequence[int], jobs: Sequence[Job], examples: Sequence[Examples], rows: Rows
    ) -> dict[int, Trained | Failed]:
        """Train the clients of the chosen jobs as one group; return their results by the index of the job."""
        ...


class Alone(Protocol):
    """Trainer of one client after another, with the bits of a deployed one."""

    def begin(self, version: Arrays, number: int = 0) -> None:
        """Take the version that the next clients train from, and its number."""
        ...

    def one(self, job: Job, rows: Rows, index: int, examples: Examples | None = None) -> Trained | Failed:
        """Train one client, on its own examples or on given ones."""
        ...


class Probe:
    """Trial of the kinds of net.

    Args:
        trainer: the trainer that gets the net.
        training: the settings of all clients' training.
        loop: the loop, for the examples of the clients and their state.
        alone: trains one client, from the version that the trainer begins with.
        resting: the tensors that no optimizer updates.
    """

    def __init__(self, trainer: Probed, training: Training, loop: Loop, alone: Alone, resting: Sequence[str]) -> None:
        assert isinstance(training.task, Task)
        self._training, self._task, self._local = training, training.task, training.local
        self._trainer, self._loop, self._alone, self._resting = trainer, loop, alone, resting
        self._rounds = 1 if training.task.algorithm is None else 2

    def choose_kind(self) -> None:
        """Give the trainer the first kind of net that supports the model and agrees.

        Raises:
            CannotBatch: no kind does; lists each kind's reason.
        """
        reasons = []
        for kind in KINDS:
            try:
                self._trainer.take(kind)
                self._check()
                return
            except HookRefused:
                raise
            except CannotBatch as error:
                reasons.append(f"{kind}: {error}")
            except Exception as error:
                reasons.append(f"{kind}: {str(error).strip() or type(error).__name__}")
        raise CannotBatch("; ".join(reasons))

    def _check(self) -> None:
        """Train the first few clients both ways; if all of them fail both ways, the next few.

        Raises:
            CannotBatch: the results differ, or no group has results.
        """
        request = {"local": dict(self._training.overrides), "algorithm": self._training.algorithm}
        self._version = ModelBench(self._task, request).initial(0)
        sites = cycle(self._task.sites)
        if not any(self._agrees_on(list(islice(sites, min(TRIED, self._trainer.at_once)))) for _ in range(TRIES)):
            raise CannotBatch("every tried client diverges to NaN or infinity: there is nothing to compare")

    def _agrees_on(self, sites: Sequence[str]) -> bool:
        """Return whether the results of these clients agree; False if there are none to compare.

        Raises:
            CannotBatch: the results differ.
        """
        every = [self._loop.examples(site) for site in sites]
        chosen = sorted(of_one_kind(every), key=lambda index: -every[index].count)
        if not chosen:
            raise CannotBatch("the task names no sites with examples in tensors to try it with")
        examples = [_revealing(every[index], self._local.batch_size, number) for number, index in enumerate(chosen)]
        seeds = [self._revealing_seed(each, number) for number, each in enumerate(examples)]
        jobs = [Job(sites[index], seed) for index, seed in zip(chosen, seeds, strict=True)]
        version, compared = self._version, list[bool]()
        for number in range(self._rounds):
            self._trainer.begin(version, number)
            alone, agree = self._one_round(jobs, examples)
            compared += agree
            version, jobs = _next(version, alone), [_again(job, one) for job, one in zip(jobs, alone, strict=True)]
        return any(compared)

    def _one_round(
        self, jobs: Sequence[Job], examples: Sequence[Examples]
    ) -> tuple[list[Trained | Failed], list[bool]]:
        """Train the clients both ways; return their results alone, and which of the conclusive ones agree."""
        rows, rows_alone = Rows(self._loop.form, len(jobs)), Rows(self._loop.form, len(jobs))
        results = self._trainer.product(range(len(jobs)), jobs, examples, rows)
        every, compared = list[Trained | Failed](), []
        for index, (job, each) in enumerate(zip(jobs, examples, strict=True)):
            every.append(self._alone.one(job, rows_alone, index, each))
            layers = self._loop.exchange.own_of(job)[0]
            compared.append(_compare(results[index], every[-1], self._resting, layers))
        self._check_isolation(jobs, examples, results)
        return every, compared[1:] or compared  # the first client's batches are full, and so reveal less

    def _check_isolation(
        self, jobs: Sequence[Job], examples: Sequence[Examples], results: dict[int, Trained | Failed]
    ) -> None:
        """Train the same clients again, the last one with far larger inputs, which may cross any threshold.

        Raises:
            CannotBatch: the update of another client has changed.
        """
        *others, last = examples
        if not others or (loud := _loud(last)) is None:
            return
        try:
            again = self._trainer.product(range(len(jobs)), jobs, [*others, loud], Rows(self._loop.form, len(jobs)))
        except CannotBatch:
            raise
        except Exception as error:  # some models fail on such numbers, for example as indices beyond their tables
            logger.debug("the model fails on large inputs: %s", error)
            return
        for index in range(len(others)):
            try:
                _compare(again[index], results[index], (), self._loop.exchange.own_of(jobs[index])[0])
            except CannotBatch as error:
                raise CannotBatch(f"the inputs of {jobs[-1].client_id} influence others: {error}") from None

    def _revealing_seed(self, examples: Examples, number: int) -> int:
        """Return a seed that puts the first example into the first batch, so that in the second one it is padding."""
        generator = torch.Generator() if self._local.shuffle else None
        for seed in count(number, TRIED):
            seed_everything(seed)
            if 0 in next(orders(examples.count, 1, generator))[: self._local.batch_size]:
                break
        return seed


def _revealing(examples: Examples, batch_size: int | None, number: int) -> Examples:
    """Return a few of a client's examples that reveal an influence between examples or between clients.

    The first client has two batches, the others one and a few examples more, so that their second batches are padded.
    Floats are scaled differently for each client, and are largest in the first example, which is the padding.
    """
    size = batch_size or examples.count
    most = examples.count if examples.count > size else max(min(2, examples.count), examples.count - number)
    taken = min(most, size + number if number else 2 * size)
    inputs, *others = taken_out(replace(examples, chosen=examples.rows(torch.arange(taken)))).tensors or ()
    if inputs.is_floating_point():
        scales = inputs.new_full((taken, *(1 for _ in inputs.shape[1:])), 0.8 * 0.6**number)
        scales[0] = 0.6**number
        inputs = inputs * scales
    return replace(examples, count=taken, tensors=(inputs, *others), chosen=None)


def _loud(examples: Examples) -> Examples | None:
    """Return the examples scaled by `LOUD` with alternating signs; None if they are not floats."""
    inputs, *others = examples.tensors or ()
    if not inputs.is_floating_point():
        return None
    signs = torch.where(torch.arange(len(inputs), device=inputs.device) % 2 == 0, LOUD, -LOUD).to(inputs.dtype)
    shaped = signs.view(-1, *(1 for _ in inputs.shape[1:]))
    return replace(examples, tensors=(inputs * shaped, *others))


def _compare(product: Trained | Failed, alone: Trained | Failed, resting: Sequence[str], layers: Arrays) -> bool:
    """Compare the results of a client in the group and alone; return False if both have failed.

    Args:
        product: the result in the group.
        alone: the result of the same client alone.
        resting: the tensors that no optimizer updates.
        layers: the local layers that the client began with.

    Raises:
        CannotBatch: the results differ.
    """
    if isinstance(product, Failed) and isinstance(alone, Failed):
        return False
    if isinstance(product, Failed) or isinstance(alone, Failed):
        way = "in the group" if isinstance(product, Failed) else "alone"
        raise CannotBatch(f"{product.client_id} diverges to NaN or infinity only {way}")
    for name in resting:
        if not np.array_equal(product.update[name], alone.update[name]):
            raise CannotBatch(f"{name} changes while a client trains, although no optimizer updates it")
    change, expected = _change(product, layers), _change(alone, layers)
    distance, length = np.linalg.norm(change - expected), np.linalg.norm(expected)
    if not distance <= TOLERANCE * length:
        raise CannotBatch(f"the update of {product.client_id} is {distance / length:.1e} off, relative to its length")
    _compare_hooks(product, alone, NOISE * float(length))
    return True


def _compare_hooks(product: Trained, alone: Trained, noise: float) -> None:
    """Compare each tensor that a custom algorithm sends or keeps.

    Raises:
        HookRefused: one differs.
    """
    ours, theirs = product.update | product.own, alone.update | alone.own
    for name in sorted(name for name in ours if name.startswith((SHARED, STATE))):
        one, other = ours[name].astype(np.float64), theirs[name].astype(np.float64)
        if not np.linalg.norm(one - other) <= TOLERANCE * np.linalg.norm(other) + noise:
            kind, _, short = name.partition("/")
            where = "client.state" if STATE.startswith(kind) else "client.shared"
            raise HookRefused(f"task.algorithm: {where}, {short}, differs between a group and one client; {WAY_OUT}")


def _next(version: Arrays, results: Sequence[Trained | Failed]) -> Arrays:
    """Return the version after a round of the trial: floats moved by the mean of the updates."""
    updates = [result.update for result in results if isinstance(result, Trained)]
    return {
        name: np.asarray(array + sum(update[name] for update in updates) / len(updates), array.dtype)
        if updates and array.dtype == np.float32
        else array
        for name, array in version.items()
    }


def _again(job: Job, result: Trained | Failed) -> Job:
    """Return the client's job of the next round."""
    own = {name: array.copy() for name, array in result.own.items()} if isinstance(result, Trained) else None
    return replace(job, own=own or None, round_id=job.round_id + 1, version=job.version + 1)


def _change(result: Trained, layers: Arrays) -> Array:
    """Return all floats of a result: of the update, and of the change of the client's state."""
    update, own = ({name: each[name] for name in sorted(each)} for each in (result.update, result.own))
    floats = [array for array in update.values() if array.dtype == np.float32]
    floats += [array - layers.get(name, 0) for name, array in own.items()]
    return np.concatenate([array.ravel() for array in floats], dtype=np.float64)  # in which squares stay finite

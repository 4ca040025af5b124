"""The private steps of a mesh client: samples, key and noise of one process (`training.private.local_steps`).

The key is in the request, from the agent's secret. So a round that is repeated after a lost rank, also on another mesh,
has the same samples and the same noise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from atoll.ground.noise.key import key_of
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.engine.step import Engine, Executor
from atoll.parallel.private.passes import PrivatePasses, Sums
from atoll.parallel.private.sums import Guarded, sums_of, try_whole
from atoll.task.errors import TaskBroken
from atoll.task.local import Local, epoch_steps
from atoll.task.task import Task
from atoll.training.private.checks import delta_fault
from atoll.training.private.local_steps import PrivateTerms
from atoll.training.private.sampler import PoissonSampler


@dataclass(frozen=True, slots=True)
class PrivateOrder:
    """The Poisson samples of a private training's steps, with the interface of `LocalOrder`."""

    num_examples: int
    steps: int
    sampler: PoissonSampler
    terms: PrivateTerms

    @property
    def sizes(self) -> list[int]:
        """The expected examples of a step; the samples' sizes are told to no one."""
        return [max(1, round(self.terms.sample_rate * self.num_examples))]

    def batches(self, first: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the epoch of each step, and the examples of its sample (B,) int64, perhaps none.

        Args:
            first: the first step.
        """
        epoch = epoch_steps(self.terms.sample_rate)
        for step in islice(range(self.steps), first, None):
            yield step // epoch, torch.from_numpy(self.sampler.indices(step))


class PrivateModel:
    """A model of a mesh that was tried for private steps.

    Args:
        task: its task.
        engine: its engine.
        clip_norm: C.
        sums: the clipped sums of its example gradients.
    """

    def __init__(self, task: Task, engine: Engine, clip_norm: float, sums: Sums) -> None:
        self._task, self._engine, self._clip_norm, self._sums = task, engine, clip_norm, sums

    def fits(self, task: Task, engine: Engine, clip_norm: float) -> bool:
        """Return whether it is the trial of an engine's model with a task and a clip norm."""
        return self._task is task and self._engine is engine and self._clip_norm == clip_norm

    @contextmanager
    def passing(self, key: bytes, terms: PrivateTerms, num_examples: int) -> Iterator[PrivatePasses]:
        """Give the engine private passes in the block.

        Args:
            key: of the noise of this training.
            terms: the mechanism.
            num_examples: of the site's data.
        """
        before: list[Executor] = []

        def private(evaluations: Executor) -> PrivatePasses:
            before.append(evaluations)
            return PrivatePasses(
                evaluations,
                self._sums,
                key=key,
                std=terms.noise_multiplier * terms.clip_norm,
                expected=terms.sample_rate * num_examples,
                device=self._engine.device,
            )

        passes = private(self._engine.executor)
        self._engine.replace_passes(lambda _: passes, sums=True)
        try:
            yield passes
        finally:
            self._engine.replace_passes(lambda _: before[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateRound:
    """The private training of one round.

    Attributes:
        key: 32 bytes, secret, of this training alone.
        seed: the public seed of the training, for the draws of the data set.
    """

    terms: PrivateTerms
    task: Task
    local: Local
    data: Any
    key: bytes
    seed: int

    def order(self) -> PrivateOrder:
        """Return its samples."""
        count, rate = len(self.data), self.terms.sample_rate
        sampler = PoissonSampler(key_of(self._of_data, "samples"), count, rate)
        return PrivateOrder(count, self.terms.steps_of(self.local), sampler, self.terms)

    @property
    def _of_data(self) -> bytes:
        return key_of(self.key, "private steps", len(self.data))

    def tried(
        self, engine: Engine, known: PrivateModel | None, build: Callable[[], nn.Module], ranks: Ranks
    ) -> PrivateModel:
        """Return the model of an engine, which is tried once for a task and a clip norm; every rank calls it.

        Args:
            engine: the engine.
            known: the model of the last round.
            build: () -> the whole model, which the first rank tries.
            ranks: of the mesh.

        Raises:
            TaskBroken: rows have no gradients of their own, or delta is too large for the site; on every rank.
        """
        terms, faults = self.terms, list[str]()
        if known is not None and known.fits(self.task, engine, terms.clip_norm):
            if fault := delta_fault(terms.delta, len(self.data)):
                raise TaskBroken(fault)
            return known
        of = Guarded(
            task=self.task,
            data=self.data,
            seed=self.seed,
            clip_norm=terms.clip_norm,
            delta=terms.delta,
            at_once=self.local.batch_size,
        )
        try_whole(of, None, build, plan=engine.plan, ranks=ranks, device=engine.device)
        try:
            sums = sums_of(engine, of)
        except TaskBroken as error:
            faults.append(str(error))
        ranks.raise_if_any(faults, TaskBroken)
        return PrivateModel(self.task, engine, terms.clip_norm, sums)

    @contextmanager
    def passing(self, model: PrivateModel) -> Iterator[PrivatePasses]:
        """Give a model's engine the private passes of this round, in the block."""
        with model.passing(key_of(self._of_data, "noise"), self.terms, len(self.data)) as passes:
            yield passes

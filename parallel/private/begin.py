"""The beginning of a private training: its model and rows are tried, and its engine gets private passes."""

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.ground.noise.key import BYTES, key_of
from atoll.parallel.engine.step import Engine, Executor
from atoll.parallel.private.account import Account
from atoll.parallel.private.loader import PoissonLoader
from atoll.parallel.private.passes import PrivatePasses
from atoll.parallel.private.terms import Terms
from atoll.task.local import epoch_steps
from atoll.task.task import Task
from atoll.training.private.local_steps import try_gradients
from atoll.training.private.noised_gradients import ROWS_AT_ONCE
from atoll.training.private.sampler import PoissonSampler


@dataclass(slots=True, kw_only=True)
class Private:
    """One private training: its terms, its account, and the secret of this process.

    Args:
        secret: 32 bytes; by default from the operating system, in memory alone. What is computed after the newest
            checkpoint is lost with the process, so that a continued training needs no earlier noise.
    """

    terms: Terms
    folder: Path
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(BYTES), repr=False)
    account: Account = field(init=False)
    passes: PrivatePasses | None = None
    steps_max: int = 0
    """The last step that the budget allows this training."""

    def __post_init__(self) -> None:
        self.account = Account(self.folder, self.terms.described)

    def loader(self, data: Any, seed: int, device: torch.device) -> PoissonLoader:
        """Return the Poisson samples of the training."""
        sampler = PoissonSampler(key_of(self.secret, "samples"), len(data), self.terms.sample_rate)
        return PoissonLoader(data, sampler, steps=epoch_steps(self.terms.sample_rate), seed=seed, device=device)

    def install(self, engine: Engine, task: Task, data: Any, seed: int) -> None:
        """Try the model on a few rows, and give the engine private passes.

        Raises:
            TaskBroken: rows have no gradients of their own, or delta is too large; all faults.
        """
        (model,) = engine.parts
        gradients = try_gradients(
            task, model.train(), data, seed, clip_norm=self.terms.clip_norm, delta=self.terms.delta
        )
        expected = self.terms.sample_rate * len(data)
        at_once = task.local.batch_size or ROWS_AT_ONCE
        key, std = key_of(self.secret, "noise"), self.terms.std

        def passes(evaluations: Executor) -> PrivatePasses:
            self.passes = PrivatePasses(evaluations, gradients, key=key, std=std, expected=expected, at_once=at_once)
            return self.passes

        engine.replace_passes(passes)

    def begin(self, step: int) -> None:
        """Begin at the step of the restored checkpoint; errors as in `Account.begin`."""
        self.account.begin(step)
        assert self.passes is not None
        self.passes.step = step
        wanted = self.account.steps + max(0, self.terms.steps - step)
        self.steps_max = step + max(0, self.terms.allowed(wanted) - self.account.steps)

    def last_step(self, planned: int) -> int:
        """Return the last step of the training: the planned one, or the last within the budget."""
        return min(planned, self.steps_max)

    @property
    def guarantee(self) -> dict[str, Any]:
        """The guarantee of all steps so far."""
        return self.terms.guarantee(self.account.steps)

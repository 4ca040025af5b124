"""The beginning of a private training: its model and rows are tried, and its engine gets private passes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.ground.noise.key import key_of
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.step import Engine, Executor
from atoll.parallel.private.account import Account
from atoll.parallel.private.loader import PoissonLoader
from atoll.parallel.private.passes import PrivatePasses
from atoll.parallel.private.secret import SecretBroken, forget, secret_of
from atoll.parallel.private.sums import Guarded, sums_of
from atoll.parallel.private.terms import Terms
from atoll.task.local import epoch_steps
from atoll.task.task import Task
from atoll.training.private.sampler import PoissonSampler


@dataclass(slots=True, kw_only=True)
class Private:
    """One private training: its terms, its account and its secret; every rank has it.

    Args:
        ranks: the ranks of the training.

    Raises:
        AccountBroken, SecretBroken: a file of the folder cannot be read; on every rank.
    """

    terms: Terms
    folder: Path
    ranks: Ranks
    account: Account = field(init=False)
    passes: PrivatePasses | None = None
    steps_max: int = 0
    """The last step that the budget allows this training."""
    _secret: bytes = field(init=False, repr=False)
    _loader: PoissonLoader | None = None

    def __post_init__(self) -> None:
        self.account = Account(self.folder, self.terms.described, self.ranks)
        found, faults = b"", list[str]()
        try:
            found = secret_of(self.folder) if self.ranks.is_first else b""
        except (SecretBroken, OSError) as error:
            faults.append(str(error))
        self.ranks.raise_if_any(faults, SecretBroken)
        self._secret = bytes.fromhex(self.ranks.gather(found.hex())[0])

    def loader(self, data: Any, seed: int, device: torch.device, axes: Axes | None) -> PoissonLoader:
        """Return this rank's part of the Poisson samples of the training."""
        part = {} if axes is None else {"rank": axes.dp_rank, "num_ranks": axes.mesh.dp}
        steps = epoch_steps(self.terms.sample_rate)
        self._loader = PoissonLoader(data, self._sampler(len(data)), steps=steps, seed=seed, device=device, **part)
        return self._loader

    def _sampler(self, num_examples: int) -> PoissonSampler:
        return PoissonSampler(self._key("samples"), num_examples, self.terms.sample_rate)

    def _key(self, purpose: str) -> bytes:
        return key_of(self._secret, purpose, self.account.repeats)

    def of(self, task: Task, data: Any, seed: int) -> Guarded:
        """Return a task as its rows are tried."""
        terms, at_once = self.terms, task.local.batch_size
        of_terms = {"clip_norm": terms.clip_norm, "delta": terms.delta}
        return Guarded(task=task, data=data, seed=seed, **of_terms, at_once=at_once)

    def install(self, engine: Engine, of: Guarded) -> None:
        """Give the engine private passes; errors as in `sums.sums_of`."""
        terms, sums = self.terms, sums_of(engine, of)
        expected = terms.sample_rate * len(of.data)

        def passes(evaluations: Executor) -> PrivatePasses:
            key = self._key("noise")
            self.passes = PrivatePasses(
                evaluations, sums, key=key, std=terms.std, expected=expected, device=engine.device
            )
            return self.passes

        engine.replace_passes(passes, sums=True)

    def begin(self, step: int) -> None:
        """Begin at the step of the restored checkpoint; errors as in `Account.begin`."""
        self.account.begin(step)
        assert self.passes is not None
        assert self._loader is not None
        self.passes.step, self.passes.key = step, self._key("noise")
        self._loader.sampler = self._sampler(self._loader.num_examples)
        wanted = self.account.steps + max(0, self.terms.steps - step)
        self.steps_max = step + max(0, self.terms.allowed(wanted) - self.account.steps)

    def end(self) -> None:
        """Forget the secret, on the first rank: the training has ended, and no step follows."""
        if self.ranks.is_first:
            forget(self.folder)

    def last_step(self, planned: int) -> int:
        """Return the last step of the training: the planned one, or the last within the budget."""
        return min(planned, self.steps_max)

    @property
    def guarantee(self) -> dict[str, Any]:
        """The guarantee of all steps so far."""
        return self.terms.guarantee(self.account.steps)

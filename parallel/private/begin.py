"""The beginning of a private training: its model and rows are tried, and its engine gets private passes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.ground.noise.key import key_of
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.step import Engine, Executor
from atoll.parallel.private.account import Account
from atoll.parallel.private.loader import PoissonLoader
from atoll.parallel.private.mesh_gradients import MeshGradients
from atoll.parallel.private.passes import PrivatePasses, Sums, SumsOfOne
from atoll.parallel.private.secret import SecretBroken, forget, secret_of
from atoll.parallel.private.terms import Terms, needs_captured
from atoll.task.errors import TaskBroken
from atoll.task.local import epoch_steps
from atoll.task.randomness import generators_kept
from atoll.task.task import Task
from atoll.training.private.captured_gradients import CapturedGradients, NotCaptured
from atoll.training.private.checks import Engine as Gradients
from atoll.training.private.checks import choose, delta_fault, trial_of
from atoll.training.private.noised_gradients import ROWS_AT_ONCE
from atoll.training.private.sampler import PoissonSampler

ELSEWHERE = (
    "on a mesh, in half precision or with recomputation gradients of single rows come from what each layer takes and "
    "gives back: use each trained weight in its layer's call alone, or train in one process in fp32"
)
"""The way out of a layer whose example gradients one process can compute."""


@dataclass(slots=True, kw_only=True)
class Private:
    """One private training: its terms, its account and its secret; every rank has it.

    Args:
        plan: the plan of the training.
        ranks: the ranks of the training.

    Raises:
        AccountBroken, SecretBroken: a file of the folder cannot be read; on every rank.
    """

    terms: Terms
    folder: Path
    plan: Plan
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

    def try_whole(
        self,
        model: nn.Module | None,
        build: Callable[[], nn.Module],
        task: Task,
        data: Any,
        seed: int,
        device: torch.device,
    ) -> None:
        """Try a few rows on the whole model, before a mesh divides it; every rank must call it.

        Args:
            model: the model with its values, on this rank; None: the first rank alone builds it.
            build: () -> the model with other values.
            task: its task.
            data: its training data.
            seed: of the data's draws.
            device: the device of this rank, to which its model moves; a model that is built here stays on the CPU.

        Raises:
            TaskBroken: rows have no gradients of their own, or delta is too large; on every rank, all faults.
        """
        if not needs_captured(self.plan):
            return
        faults = list[str]()
        if model is not None or self.ranks.is_first:
            with generators_kept():
                whole, at = (build(), torch.device("cpu")) if model is None else (model.to(device), device)
                _, faults = self._tried(whole, task, data, seed, at, captured=True)
        faults = list(dict.fromkeys(fault for found in self.ranks.gather(faults) for fault in found))
        if faults:
            raise TaskBroken("; ".join(faults))

    def install(self, engine: Engine, task: Task, data: Any, seed: int, axes: Axes | None) -> None:
        """Give the engine private passes; in one process try the model on a few rows.

        Raises:
            TaskBroken: rows have no gradients of their own, or delta is too large; all faults.
        """
        sums = self._sums(engine, task, data, seed, axes)
        expected = self.terms.sample_rate * len(data)

        def passes(evaluations: Executor) -> PrivatePasses:
            self.passes = PrivatePasses(
                evaluations,
                sums,
                key=self._key("noise"),
                std=self.terms.std,
                expected=expected,
                device=engine.device,
            )
            return self.passes

        engine.replace_passes(passes, sums=True)

    def _sums(self, engine: Engine, task: Task, data: Any, seed: int, axes: Axes | None) -> Sums:
        (model,), at_once = engine.parts, task.local.batch_size or ROWS_AT_ONCE
        if not needs_captured(self.plan):
            gradients, faults = self._tried(model, task, data, seed, engine.device)
            if faults or gradients is None:
                raise TaskBroken("; ".join(faults))
            return SumsOfOne(gradients, at_once=at_once, passes=self.plan.accumulate)
        try:
            return MeshGradients(
                model,
                task.loss,
                self.terms.clip_norm,
                plan=self.plan,
                axes=axes,
                device=engine.device,
                at_once=at_once,
                agreement=next(iter(engine.agreements), None),
            )
        except NotCaptured as error:
            raise TaskBroken(str(error)) from error

    def _tried(
        self, model: nn.Module, task: Task, data: Any, seed: int, device: torch.device, *, captured: bool = False
    ) -> tuple[Gradients | None, list[str]]:
        trial = trial_of(task, model.train(), data, seed, device)
        gradients, faults = choose(trial, self.terms.clip_norm)
        if captured and gradients is not None and not isinstance(gradients, CapturedGradients):
            gradients, faults = choose(trial, self.terms.clip_norm, ways=(CapturedGradients,))
            faults = [f"{fault}; {ELSEWHERE}" for fault in faults]
        if fault := delta_fault(self.terms.delta, len(data)):
            faults.append(fault)
        return gradients, faults

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

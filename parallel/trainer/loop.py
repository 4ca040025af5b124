"""The training loop: step, evaluate, save; until the last step, a request to stop, or the end of patience."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.nn.modules.batchnorm import _NormBase

from atoll.ground.printable import count_of
from atoll.parallel.checkpoint.errors import CheckpointFailed
from atoll.parallel.checkpoint.export import export_model
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.data.batch import Batch
from atoll.parallel.data.loader import Loader
from atoll.parallel.engine.buffers import differing_buffers
from atoll.parallel.engine.step import Engine, Measured
from atoll.parallel.private.begin import Private
from atoll.parallel.private.loader import PoissonLoader
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.evaluation import evaluate
from atoll.parallel.trainer.guard import Guard
from atoll.parallel.trainer.logs import Report
from atoll.parallel.trainer.meter import Meter
from atoll.parallel.trainer.noise import NoiseMeter
from atoll.parallel.trainer.patience import Patience
from atoll.parallel.trainer.recipe import Recipe
from atoll.parallel.trainer.same_batch import SameBatch
from atoll.parallel.trainer.saver import Saver
from atoll.parallel.trainer.stopping import Agreement
from atoll.parallel.trials.between_passes import OWN_EXAMPLES
from atoll.task.errors import NotFinite, TaskBroken
from atoll.task.task import Task
from atoll.training.data.units import units_of
from atoll.training.trials.same_form import SameForm
from atoll.training.trials.unit_check import UnitCheck, is_due

Values = dict[str, float | None]
"""The values of the metrics, by DATA/METRIC."""

MODEL, BEST = "model.safetensors", "best.safetensors"


@dataclass(frozen=True, slots=True)
class Due:
    """The actions that are due after a step."""

    log: bool
    evaluation: bool
    checkpoint: bool

    @property
    def any(self) -> bool:
        """Whether any action needs the step's numbers."""
        return self.log or self.evaluation or self.checkpoint


@dataclass(slots=True, kw_only=True)
class Training:
    """One rank's side of a training; every method is called by all ranks, at the same point."""

    task: Task
    config: TrainConfig
    recipe: Recipe
    engine: Engine
    loader: Loader | PoissonLoader
    """The loader of the training data."""

    tests: Mapping[str, Loader]
    """The loaders of the data for evaluation, by name."""

    saver: Saver
    agreement: Agreement
    patience: Patience
    noise: NoiseMeter
    meter: Meter
    guard: Guard
    same_batch: SameBatch
    unit_check: UnitCheck
    form: SameForm
    ranks: Ranks
    report: Report
    folder: Path
    """The folder of the model's files."""

    private: Private | None = None
    """The terms and the account of a private training, whose loss is never told."""

    tied: list[list[str]]
    """Names of the tied weights of the whole model."""
    frozen: frozenset[str]
    """Names of the model's frozen tensors, which no exported model has."""

    values: Values | None = None
    """The values of the last evaluation, if it was after the last step."""

    units: float = 0.0
    """The units of this rank's batches since the start of this process."""

    has_stepped: bool = False
    """Whether this process has made a step."""

    reported: int | None = None
    """The step of the newest checkpoint whose completion was reported."""

    def run(self) -> str:
        """Train to the last step, a request to stop, or the end of patience.

        Returns:
            The reason of the end: finished, early, budget (of privacy) or interrupted. In each case the last
            checkpoint is complete.

        Raises:
            NotFinite: the loss is no longer finite; the checkpoints are of earlier steps.
            TaskBroken: ranks that must read the same batch read different ones (`same_batch`); the units of the loss
                are guessed, and wrong (`unit_check`), or 0 in all steps; or a forward pass has changed the model's
                form. Nothing of that step is saved.
        """
        self.meter.resume()
        self.reported = self.saver.complete
        is_whole = self.engine.steps == 0
        for batch in self._batches():
            due = self._due()
            measured = self._step(batch, due)
            if due.any or is_due(self.engine.steps):
                self._check_task()
            if due.any:
                self._check_finite()
            if due.log:
                self._log(measured)
            if due.evaluation:
                self._watch(self._evaluate())
            if due.checkpoint:
                self._save()
            self._report_complete()
            if due.evaluation or due.checkpoint:
                self.meter.resume()
            if self.agreement.should_stop():
                self._check_task()
                self._check_finite()
                self._save()
                self._settle()
                return "interrupted"
        if is_whole and self.private is None:
            self._check_units()
        return self._finish()

    @property
    def last_step(self) -> int:
        """The last step of the training: of the recipe, or the last one within the budget of privacy."""
        return self.recipe.steps if self.private is None else self.private.last_step(self.recipe.steps)

    def _charge(self) -> None:
        """Charge the steps so far, before anything that follows from them is told or written."""
        if self.private is not None:
            self.private.account.charge(self.engine.steps)

    def _batches(self) -> Iterator[Batch]:
        """Yield the remaining batches of the training."""
        while self.engine.steps < self.last_step and not self.patience.is_over:
            for batch in self.loader:
                yield batch
                if self.engine.steps >= self.last_step or self.patience.is_over:
                    return

    def _due(self) -> Due:
        """Return the actions after the step whose batch the loader has just yielded."""
        step, config = self.engine.steps + 1, self.config
        is_last = step == self.last_step
        ends_epoch = self.loader.step == len(self.loader)

        def is_due(every: int | None) -> bool:
            return is_last or (ends_epoch if every is None else step % every == 0)

        return Due(is_due(config.log_every), is_due(config.eval_every), is_due(config.checkpoint_every))

    def _step(self, batch: Batch, due: Due) -> Measured:
        self.same_batch.check(batch)
        self.units += batch.count
        measures = self.noise.is_due(self.engine.steps + 1)
        total = 1 if units_of(self.task).is_sum or self.private is not None else None
        measured = self.engine.step(batch, total=total, report=due.any, measure_noise=measures)
        if not self.has_stepped:
            self._check_buffers()
            self.has_stepped = True
        if measures:
            self.noise.see(measured.noise)
        self.guard.see(self.engine.steps, measured.loss, measured.grad_norm)
        self.meter.step(batch, self.recipe.order.size(self.loader.step - 1))
        self.values = None
        return measured

    def _check_finite(self) -> None:
        if (step := self.guard.first_bad_step()) is not None:
            raise NotFinite(
                f"the loss or its gradient is not finite in step {step} "
                f"(learning rate {self.recipe.schedule(step - 1):g}); {self._kept()}"
            )

    def _kept(self) -> str:
        """Return the sentence about the newest checkpoint, which is complete or has failed when this returns."""
        try:
            self._settle()
        except CheckpointFailed as error:
            return str(error)
        newest = self.saver.latest()
        return "there is no checkpoint yet" if newest is None else f"the checkpoint of step {newest} is kept"

    def _check_task(self) -> None:
        """Refuse wrong guesses of the loss's units, and a changed form of the model, on all ranks together."""
        fault = self.unit_check.found or self.form.fault()
        if found := [sentence for sentence in self.ranks.gather(fault) if sentence]:
            self._settle()
            raise TaskBroken(found[0])

    def _check_buffers(self) -> None:
        """Refuse buffers that follow the examples of each rank, which the trial of a large model cannot find."""
        if names := differing_buffers(self.engine.parts, self.engine.axes, without=(_NormBase,)):
            self._settle()
            raise TaskBroken(f"{', '.join(names)}: {OWN_EXAMPLES.format(mesh=self.engine.plan.mesh)}")

    def _check_units(self) -> None:
        """Refuse a training in which no target of any rank counted: its loss is a mean over nothing."""
        if not sum(self.ranks.gather(self.units)):
            raise TaskBroken(
                f"the targets of {count_of(self.engine.steps, 'step')} have no units (every target is ignored), so "
                "nothing was trained: check the task's targets, or its units"
            )

    def _log(self, measured: Measured) -> None:
        self._charge()
        step = self.engine.steps
        event: dict[str, Any] = {"event": "step", "step": step, "epoch": self._epochs()}
        if self.private is None:
            event["loss"] = measured.loss.item()
        if measured.grad_norm is not None:
            event["grad_norm"] = measured.grad_norm.item()
        event["lr"] = self.recipe.schedule(step - 1)
        self.report(event | self.meter.read(step) | self.noise.read())

    def _epochs(self) -> float:
        return round(self.loader.epoch + self.loader.step / len(self.loader), 4)

    def _evaluate(self) -> Values:
        self._charge()
        self.engine.flush()
        found: Values = {}
        for name, loader in self.tests.items():
            batches = self.same_batch.checked(loader)
            values = evaluate(self.engine, self.task, batches, self.ranks, self.unit_check)
            found |= {f"{name}/{metric}": value for metric, value in values.items()}
        self._check_task()
        self.report({"event": "evaluation", "step": self.engine.steps, "epoch": self._epochs(), **found})
        self.values = found
        return found

    def _watch(self, found: Values) -> None:
        """Record the watched metric; export the model if it is the best so far."""
        if self.config.patience is not None:
            self.patience.see(found.get(f"{next(iter(self.tests))}/{self.config.watch}"))
            if self.patience.waited == 0:
                export_model(self.engine.parts, self.folder / BEST, self.tied, self.frozen)

    def _save(self) -> None:
        if self.saver.newest != self.engine.steps:
            self._charge()
            self._settle()
            self.saver.save()

    def _settle(self) -> None:
        self.saver.settle()
        self._report_complete()

    def _report_complete(self) -> None:
        """Report the newest checkpoint once it is complete; on the first rank, which knows."""
        if self.saver.complete != self.reported:
            self.reported = self.saver.complete
            self.report({"event": "checkpoint", "step": self.reported})

    def _finish(self) -> str:
        """Write the results of the training, also of one that had ended before."""
        if self.values is None:
            self._evaluate()
        self._save()
        self._settle()
        export_model(self.engine.parts, self.folder / MODEL, self.tied, self.frozen)
        if self.patience.is_over:
            return "early"
        return "finished" if self.engine.steps >= self.recipe.steps else "budget"

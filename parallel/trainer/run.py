"""One rank's whole training: from a job to a model on disk. All checks come first."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from atoll.ground.faults import faults_in
from atoll.parallel.checkpoint.checkpointer import Checkpointer
from atoll.parallel.checkpoint.randomness import seed_generators
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.checkpoint.store import Store
from atoll.parallel.data.loader import Loader
from atoll.parallel.data.rows_read import rows_read
from atoll.parallel.engine.assemble import assemble, begin_again
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.step import Engine
from atoll.parallel.private.begin import Private
from atoll.parallel.private.loader import PoissonLoader
from atoll.parallel.private.sums import try_whole
from atoll.parallel.trainer.building import Built, agreed_base, build, give_values, seeded
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.data import Data, data_for, in_order
from atoll.parallel.trainer.flops import flops_per_example, peak_flops
from atoll.parallel.trainer.guard import Guard
from atoll.parallel.trainer.job import Job, JobRefused, check_job
from atoll.parallel.trainer.logs import Report
from atoll.parallel.trainer.loop import Training, Values
from atoll.parallel.trainer.meter import Meter
from atoll.parallel.trainer.noise import NoiseMeter
from atoll.parallel.trainer.outside import Outside, functions_of
from atoll.parallel.trainer.patience import Patience
from atoll.parallel.trainer.recipe import Recipe, make_recipe
from atoll.parallel.trainer.same_batch import SameBatch
from atoll.parallel.trainer.saver import Carried, Saver, settings_of
from atoll.parallel.trainer.stopping import Agreement
from atoll.parallel.trials.mesh import try_on_mesh
from atoll.parallel.world import World, process_group
from atoll.task.context import context_of, within
from atoll.task.json_text import to_json
from atoll.task.randomness import generators_kept
from atoll.training.base.kept_lines import BASES
from atoll.training.data.batches import fetcher
from atoll.training.data.units import units_of
from atoll.training.model.frozen import frozen_of
from atoll.training.optimizers.make import make_optimizer
from atoll.training.trials.same_form import SameForm
from atoll.training.trials.unit_check import UnitCheck
from atoll.training.worker.warm_start import Start

CHECKPOINTS, LOG, RESULT = "checkpoints", "log.jsonl", "result.json"
"""The entries in the folder of a training, beside the models."""

SMALL = 1_000_000
"""Number of parameters from which on products are worth more than one thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a training, as `result.json` has it."""

    task: str
    why: str
    """The reason why the training ended: finished, early, budget (of privacy) or interrupted."""
    steps: int
    epochs: float
    examples: int
    """The number of examples trained on, counted again in each epoch."""
    metrics: Values
    """The values of the last model's metrics, by DATA/METRIC; empty if it was interrupted before its evaluation."""
    seconds: float
    """The duration over all processes [s]."""
    mesh: str
    ranks: int
    device: str
    torch: str
    privacy: dict[str, Any] | None = None
    """The guarantee of a private training, over all steps that its folder has seen; None: it is not private."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The environment of a rank, from its launcher."""

    world: World
    device: str
    """The kind of device: cpu or cuda."""
    folder: Path
    """The folder of this training; on storage that all ranks share."""
    clock: Callable[[], float]
    """The present instant [s], monotonic."""
    is_told_to_stop: Callable[[], bool]
    """() -> whether the training was asked to stop."""
    report: Report
    """The report of events on the first rank; on the others it does nothing."""


def train(job: Job, here: Surroundings) -> Result:
    """Train, or continue from the newest checkpoint in the folder.

    Every rank of the job calls it. The first one writes log, models and result.

    Raises:
        JobRefused: the job conflicts with itself, its data or the world, before any process group; lists every reason.
        TaskBroken: there is no data to train on.
        RunDiffers, CheckpointMismatch: the folder holds another training.
        NotFinite: the loss is no longer finite.
    """
    with within(context_of(job.task, seed=job.config.seed)):
        return _train(job, here)


def _train(job: Job, here: Surroundings) -> Result:
    check_job(job, here.world.size)
    found = _data(job, here)
    borrowed = try_on_mesh(job.task, job.plan, job.config.seed, found.train, tells=here.world.is_first)
    built = build(job, _start(job.config, here))
    recipe = _recipe(job, len(found.train), built.model)
    with _threads(threads_for(built.model, job.config.threads)), _axes(job, here) as axes:
        return _Builder(job, recipe, here, axes, built, borrowed).train(found.train, found.tests)


def _data(job: Job, here: Surroundings) -> Data:
    batch, passes = job.config.batch_size or job.task.local.batch_size, job.plan.mesh.dp * job.plan.microbatches
    at_once = None if batch is None else max(min(batch, 2), batch // passes)  # one row has no statistics
    device = here.world.device(here.device)
    evaluated = job.config.eval_batch_size
    batches = {"at_once": at_once, "evaluated_at_once": evaluated}
    return data_for(job.task, job.plan, seed=job.config.seed, device=device, **batches)


def _start(config: TrainConfig, here: Surroundings) -> Start | None:
    """Return the file from which a new training's model starts; None: there is none, or it has begun."""
    if config.start is None or Store(here.folder / CHECKPOINTS).latest() is not None:
        return None
    return Start(Path(config.start), config.strict)


def threads_for(model: nn.Module, wanted: int | None) -> int:
    """Return the number of CPU threads of a matrix product: `wanted`, or one if more would only wait for each other."""
    if wanted is not None:
        return wanted
    return 1 if sum(parameter.numel() for parameter in model.parameters()) < SMALL else torch.get_num_threads()


def _recipe(job: Job, num_examples: int, model: nn.Module) -> Recipe:
    has_norms = any(isinstance(module, _BatchNorm) for module in model.modules())
    divisions = job.plan.microbatches * (job.plan.mesh.dp if job.plan.batchnorm == "local" else 1)
    config = job.config
    if job.private is not None:
        expected = max(job.plan.mesh.dp, round(job.private.sample_rate * num_examples))
        config = replace(config, batch_size=expected, steps=job.private.steps)
    try:
        return make_recipe(
            job.task.local,
            config,
            num_examples=num_examples,
            num_ranks=job.plan.mesh.dp,
            last_min=2 * divisions if has_norms else 1,
        )
    except ValueError as error:
        raise JobRefused(*faults_in(error)) from error


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _axes(job: Job, here: Surroundings) -> Iterator[Axes | None]:
    """Provide the mesh over a process group, a new or an existing one; None if one process needs neither."""
    if job.plan.mesh.size == 1 and not job.plan.is_sharded:
        yield None
    elif dist.is_initialized():
        yield Axes(job.plan.mesh, here.device)
    else:
        with process_group(here.world, here.device):
            yield Axes(job.plan.mesh, here.device)


@dataclass(frozen=True)
class _Builder:
    job: Job
    recipe: Recipe
    here: Surroundings
    axes: Axes | None
    built: Built
    borrowed: list[str]

    @property
    def device(self) -> torch.device:
        return self.here.world.device(self.here.device)

    @property
    def dp_rank(self) -> int:
        return 0 if self.axes is None else self.axes.dp_rank

    @cached_property
    def _unit_check(self) -> UnitCheck:
        job = self.job
        must_hold = job.plan.divides or job.config.noise_every is not None
        return UnitCheck(job.task.loss, units_of(job.task), must_hold=must_hold, may_list=job.task.collate is not None)

    @cached_property
    def _optimization(self) -> Optimization:
        return Optimization(
            loss=self._unit_check,
            make_optimizer=lambda named: make_optimizer(self.recipe.optimizer, named),
            lr=self.recipe.schedule,
            clip_norm=self.recipe.clip_norm,
        )

    def train(self, data: Any, tests: Any) -> Result:
        job, here, config = self.job, self.here, self.job.config
        built, ranks = self.built, Ranks()
        private = self._private(ranks, data)
        engine = self._engine()
        give_values(built, job, engine.parts, self.axes, self.device)
        if built.blank is not None and job.plan.is_sharded:
            begin_again(engine, self._optimization)  # with the optimizer for the device that the shards now lie on
        seed_generators(config.seed, 0, 0 if self.axes is None else self.axes.draw)
        if private is None:
            loader: Loader | PoissonLoader = self._loader(data)
        else:
            private.install(engine, private.of(job.task, data, config.seed))
            loader = private.loader(data, config.seed, self.device, self.axes)
        patience, noise, meter = Patience(config), NoiseMeter(config.noise_every), self._meter(data)
        carried: dict[str, Carried] = {"loader": loader, "patience": patience, "noise": noise, "meter": meter}
        carried["outside"] = Outside(engine.parts, functions_of(job.task), ranks, data)
        with self._checkpointer(built.tied) as checkpointer:
            checkpointer.without = built.from_base
            settings = settings_of(job, self.recipe) | agreed_base(built, here.world, here.folder / BASES)
            rows = ranks.gather(rows_read(data, config.seed))[0]
            saver = Saver(checkpointer, settings, engine, carried, config.seed, rows)
            saver.restore()
            if private is not None:
                private.begin(engine.steps)
            local = {**asdict(job.task.local), "optimizer": job.task.local.optimizer_name}
            here.report(
                {"event": "begin", "step": engine.steps, "steps": self.recipe.steps, "task": job.name}
                | {"train": asdict(config), "local": local, "plan": asdict(job.plan)}
                | ({"start": built.note} if built.note else {})
                | ({"unused": "algorithm"} if job.task.algorithm is not None else {})
            )
            training = Training(
                task=job.task,
                config=config,
                recipe=self.recipe,
                engine=engine,
                loader=loader,
                tests=self._tests(tests),
                saver=saver,
                agreement=Agreement(here.is_told_to_stop, here.clock, ranks.group),
                patience=patience,
                noise=noise,
                meter=meter,
                guard=Guard(self.device),
                same_batch=SameBatch(self.axes),
                unit_check=self._unit_check,
                form=SameForm(*engine.parts),
                ranks=ranks,
                report=here.report,
                folder=here.folder,
                tied=built.tied,
                frozen=frozen_of(built.model),
                private=private,
            )
            why = training.run()
        if private is not None and why != "interrupted":
            private.end()
        ranks.close()
        return self._result(training, why)

    def _private(self, ranks: Ranks, data: Any) -> Private | None:
        """Return the private training, after the trial of the whole model; None: it is not private."""
        job = self.job
        if job.private is None:
            return None
        private = Private(terms=job.private, folder=self.here.folder, ranks=ranks)
        model = self.built.model if self.built.blank is None else None
        of = private.of(job.task, data, job.config.seed)
        try_whole(of, model, lambda: seeded(job)(), plan=job.plan, ranks=ranks, device=self.device)
        return private

    def _loader(self, data: Any) -> Loader:
        job, config = self.job, self.job.config
        return Loader(
            data,
            self.recipe.order,
            rank=self.dp_rank,
            device=self.device,
            prefetch=config.prefetch,
            num_workers=config.workers,
            count=units_of(job.task),
            parts=job.plan.accumulate if job.plan.mesh.pp == 1 else 1,
        )

    def _engine(self) -> Engine:
        order, plan = self.recipe.order, self.job.plan
        return assemble(
            self.built.model,
            plan,
            self._optimization,
            axes=self.axes,
            device=self.device,
            borrowed=self._agreed(self.borrowed),
            rows=max(order.counts(step)[self.dp_rank] for step in {0, order.num_steps - 1}),
        )

    def _agreed(self, borrowed: list[str]) -> list[str]:
        """Return the first rank's list of borrowed blocks: a model that branches by its values may differ elsewhere."""
        lists = [borrowed]
        if self.axes is not None:
            dist.broadcast_object_list(lists, src=0)
        return lists[0]

    def _tests(self, tests: Any) -> dict[str, Loader]:
        order = self.recipe.order
        size = self.job.config.eval_batch_size or order.batch_size
        return {
            name: in_order(data, batch_size=size, num_ranks=order.num_ranks, rank=self.dp_rank, device=self.device)
            for name, data in tests.items()
        }

    def _meter(self, data: Any) -> Meter:
        peak = peak_flops(self.device, self.job.plan.precision)
        flops = None
        if peak is not None and self.here.world.is_first:
            with generators_kept():  # on this rank alone
                flops = flops_per_example(self.job.task, fetcher(data)(torch.arange(1))[0])
        return Meter(
            self.here.clock,
            steps=self.recipe.steps,
            device=self.device,
            flops=flops,
            peak=peak and peak * self.here.world.size,
        )

    def _checkpointer(self, tied: list[list[str]]) -> Checkpointer:
        plan, config = self.job.plan, self.job.config
        has_copies = self.axes is not None and plan.outer != "none"
        return Checkpointer(
            self.here.folder / CHECKPOINTS,
            keep=config.keep,
            asynchronous=config.asynchronous,
            mesh=plan.mesh.degrees,
            tied=tied,
            replica=self.axes.coordinates["dp_replicate"] if has_copies and self.axes is not None else 0,
            seed=config.seed,
        )

    def _result(self, training: Training, why: str) -> Result:
        steps, order = training.engine.steps, self.recipe.order
        private = training.private
        of_epoch = order.num_steps if private is None else len(training.loader)
        epochs, rest = divmod(steps, order.num_steps)
        examples_per_epoch = order.batch_size * (order.num_steps - 1) + order.size(order.num_steps - 1)
        result = Result(
            task=self.job.name,
            why=why,
            steps=steps,
            epochs=round(steps / of_epoch, 4),
            examples=steps * order.batch_size if private else epochs * examples_per_epoch + rest * order.batch_size,
            metrics=training.values or {},
            seconds=training.meter.seconds,
            mesh=str(self.job.plan.mesh),
            ranks=self.here.world.size,
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            torch=torch.__version__,
            privacy=private.guarantee if private else None,
        )
        self.here.report({"event": "end", "step": steps, "why": why, "seconds": result.seconds})
        if self.here.world.is_first:
            _write(self.here.folder / RESULT, to_json(asdict(result), indent=2) + "\n")
        return result


def _write(path: Path, text: str) -> None:
    """Write a small file that appears at once."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, "utf-8")
    part.replace(path)

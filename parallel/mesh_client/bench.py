"""`MeshBench`: a `Task` loaded with one site's data on a mesh of ranks, as `worker/model_bench` in one process.

Every rank calls the same methods in the same order. Those of rank 0 return what the worker protocol answers
(`worker/main`); an update is a folder of parts, one for each rank that owns boxes of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.parallel.checkpoint.randomness import seed_generators
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.data.order import share
from atoll.parallel.engine.assemble import begin_again
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.passes import casting
from atoll.parallel.engine.plan import Plan
from atoll.parallel.hooks import MeshClient
from atoll.parallel.mesh_client.building import Here, MeshModel, Outline, Shard, build
from atoll.parallel.mesh_client.control import corrections_of
from atoll.parallel.mesh_client.crash_points import reached
from atoll.parallel.mesh_client.faults import faults_of_mesh, outline_of
from atoll.parallel.mesh_client.hook_files import client_of
from atoll.parallel.mesh_client.in_round import checkpoints
from atoll.parallel.mesh_client.kept_optimizer import give_state
from atoll.parallel.mesh_client.private import PrivateModel, PrivateRound
from atoll.parallel.mesh_client.secure_words import encode_parts, mask_parts, plan_in
from atoll.parallel.mesh_client.together import together
from atoll.parallel.mesh_client.training import LocalTraining, optimizer_of
from atoll.parallel.mesh_client.update import Files
from atoll.parallel.mesh_client.use import RoundUse
from atoll.parallel.private.passes import PrivatePasses
from atoll.parallel.private.terms import plan_faults
from atoll.parallel.trainer.data import in_order as loader_in_order
from atoll.parallel.trainer.evaluation import statistics
from atoll.parallel.trainer.stopping import INTERVAL_S, Agreement
from atoll.parallel.trials.hooks import ROUNDS, HooksTrial, places_of
from atoll.parallel.trials.mesh import needs_trials, try_on_mesh
from atoll.parallel.world import World
from atoll.task.context import Context, within
from atoll.task.deadline import Deadline
from atoll.task.errors import TaskBroken, TaskMismatch
from atoll.task.local import Local
from atoll.task.metrics import sound
from atoll.task.randomness import repeat_on, seed_everything, seeded
from atoll.task.task import Task
from atoll.tensors.layout import CONTROL, Layout, Tensor, in_order
from atoll.tensors.safetensors_file import parse_header
from atoll.training.data.batches import batch_sizes
from atoll.training.local.algorithms import check_training
from atoll.training.local.client import form_of_shared
from atoll.training.local.local_layers import names_that_stay
from atoll.training.local.local_order import draw_order
from atoll.training.local.training import Work
from atoll.training.model.parameters import build_model, forms_of
from atoll.training.optimizers.norms import local
from atoll.training.private.local_steps import training_key
from atoll.training.worker.bench import Json
from atoll.training.worker.left_behind import LeftBehind
from atoll.training.worker.operations import layout_fields
from atoll.training.worker.site_task import SiteTask, device_of, model_seed

IsTold = Callable[[], bool]
"""() -> whether this rank was told to end the training early; rank 0 alone is told."""


EVALUATED_AT_ONCE = 256
"""Examples of one batch of an evaluation, on all ranks together; as in one process."""


class MeshBench:
    """A task loaded with one site's data, on a mesh of ranks that train and evaluate it.

    Args:
        task: the task as it was loaded.
        request: `load` (`worker/main`).
        plan: the parallelism of the site.
        world: the `World` of this rank; its process group is there, unless it is alone.
        clock: returns the present instant [s], monotonic, so that the ranks agree on an early end about twice a second;
            None: after every step.

    Raises:
        OverridesRefused: values of the run or the site do not fit the task; the message lists every reason.
        TaskBroken: the mesh cannot do the training; the message lists every reason.
        ValueError: the mesh has not the size of the process group.
    """

    def __init__(
        self, task: Task, request: Json, plan: Plan, world: World, clock: Callable[[], float] | None = None
    ) -> None:
        if request.get("threads"):
            torch.set_num_threads(request["threads"])
        self._here, self._plan = SiteTask(task, request), plan
        self._bases = Path(request["bases"]) if request.get("bases") else None
        self._outlined: tuple[Task, nn.Module] | None = None
        self._fitting: tuple[Task, Local, str] | None = None
        self._looked: tuple[Task, list[str]] | None = None
        self._check(self._here.local, self._here.algorithm)
        if self._here.is_private:
            self._check_plan()
        self._device = world.device(device_of(request))
        repeat_on(self._device.type)
        needs_axes = plan.mesh.size > 1 or plan.is_sharded
        self._axes = Axes(plan.mesh, self._device.type) if needs_axes else None
        self._ranks, self._clock = Ranks(), clock or count(step=INTERVAL_S).__next__
        self._use = RoundUse(self._ranks, self._device, plan.precision, self._clock)
        self._is_first_here = world.local_rank == 0
        self._built_for: tuple[Task, int, int | None, str | None] | None = None
        self._tried: tuple[Task, dict[str, DTensor], set[tuple[Local, int]]] | None = None
        self._model: MeshModel | None = None
        self._guarded: PrivateModel | None = None
        self._left = LeftBehind(self._here.task, self._here.local, with_process=False)

    @property
    def steps(self) -> int:
        """The number of steps that the running training has made."""
        return 0 if self._model is None else self._model.engine.steps

    def describe(self) -> Json:
        """Return the size of the site's data, the layout of the model, and the settings that the task declares.

        Raises:
            TaskBroken: a forward pass does what this mesh cannot take.
        """
        layout = layout_fields(self._layout())
        self._borrowed()
        self._check_hooks(self._here.local, self._here.context({}))
        cast = partial(casting, self._plan, self._device)
        together(self._ranks, lambda: self._here.try_out(self._device.type, cast))
        return {
            "num_examples": self._here.num_examples(),
            "layout": layout,
            "settings": list(self._here.task.settings),
        }

    def train(self, request: Json, is_told: IsTold) -> Json:
        """Train as `ModelBench.train` does, and write the update into the folder `out`.

        Args:
            request: `train` (`worker/main`), with `checkpoint` and its interval (`in_round`).
            is_told: tells whether this rank was asked to stop; called between steps.

        Returns:
            The answer, with the pieces of each part under `parts`, and under `mesh` the use of it in this attempt. With
            `secure` the parts are encoded for a secure sum, and `encoded` has their norm.

        Raises:
            TaskBroken, TaskMismatch, NotFinite, OutOfTime, OSError: as in one process; on all ranks.
            CheckpointMismatch, CheckpointFailed: of the checkpoint in the round.
        """
        local = self._here.local_of(request, (request.get("version") or 0) + 1)
        algorithm = request.get("algorithm") or "fedavg"
        self._check(local, algorithm)
        dataset = together(self._ranks, self._training_data)
        outline = self._outline()
        self._use.begin()
        context = self._context(request, round=request.get("round_id") or 0)
        self._check_hooks(local, context)
        private, task = self._private(request, local, dataset), self._here.task
        with within(context):
            seed_everything(request["seed"])
            order = draw_order(len(dataset), local, outline) if private is None else private.order()
            model = self._the_model(request, local)
            client = self._begin(model, local, algorithm, request, context)
            self._seed(request["seed"])
            with (
                self._passing(private, model, request) as passes,
                checkpoints(request, task, model, dataset, order.steps, self._ranks, self._clock, client) as after_step,
            ):
                training = LocalTraining(
                    task=task,
                    local=local,
                    order=order,
                    dataset=dataset,
                    seed=request["seed"],
                    model=model,
                    ranks=self._ranks,
                    agreement=Agreement(is_told, self._clock, self._ranks.group),
                    client=client,
                    after_first=lambda: self._check_buffers(model),
                    after_step=after_step,
                    private=passes,
                )
                begun_at = model.engine.steps
                if begun_at:  # after a checkpoint: the noise of the steps before it is used
                    context.noise.narrow("step", begun_at)
                self._use.begin_training()
                work, is_stopped = training.run()
                self._check_buffers(model)
                model.engine.flush()
                if client is not None:
                    client.end()
                self._use.end_training()
            examples = sum(order.sizes[step % len(order.sizes)] for step in range(begun_at, work.steps))
            use = self._use.of(task, training.example, work.steps - begun_at, examples)
        reached("crew.trained")
        files = Files(model, local, algorithm, request, self._ranks, client)
        written = self._written(files, work)
        reached("crew.answering")
        return {
            "num_examples": work.num_examples,
            "work": work.work,
            "stopped": is_stopped,
            **written,
            "has_own": bool(files.kept),
            "steps": work.steps,
            "mesh": use,
            **_normalizer(work, algorithm),
        }

    def _private(self, request: Json, local: Local, dataset: Any) -> PrivateRound | None:
        """Return the private training of a request; None: it is not private. Errors as in `SiteTask.private_of`."""
        terms = self._here.private_of(request)
        if terms is None:
            return None
        self._check_plan()
        if terms.batch:
            raise TaskBroken(
                'privacy.noise_by: got "clients": with unit = "example" a mesh adds its noise in its steps: allowed is '
                '"site", or one process at this site'
            )
        of_request = {"key": training_key(request), "seed": request["seed"]}
        return PrivateRound(terms=terms, task=self._here.task, local=local, data=dataset, **of_request)

    def _check_plan(self) -> None:
        if faults := [*plan_faults(self._plan)]:
            raise TaskBroken(*faults)

    @contextmanager
    def _passing(self, private: PrivateRound | None, model: MeshModel, request: Json) -> Iterator[PrivatePasses | None]:
        """Give the model's engine private passes in the block, after the trial of its rows; None: it is not private.

        Raises:
            TaskBroken: as `PrivateRound.tried`; on all ranks.
        """
        if private is None:
            yield None
            return
        make = partial(build_model, self._here.task, model_seed(request))
        self._guarded = private.tried(model.engine, self._guarded, make, self._ranks)
        with private.passing(self._guarded) as passes:
            yield passes

    def _written(self, files: Files, work: Work) -> Json:
        """Write the parts of the update, encoded if it is for a secure sum; return what the answer says of them."""
        parts, statistics = files.write(), sound(self._here.task.metrics, work.statistics)
        if not (order := files.request.get("secure")):
            return {"statistics": statistics, "parts": [part for part in parts if part]}
        num_examples, sums = self._ranks.gather([work.num_examples, statistics])[0]  # one plan at all ranks
        plan = plan_in(order, num_examples, sums)
        encoded = encode_parts(order, files.version, Path(files.request["out"]), parts, plan, self._ranks)
        return {"statistics": statistics, **encoded}

    def evaluate(self, request: Json) -> Json:
        """Return the sums of the loss and the metrics on a split of the site, or the reason why there are none.

        Args:
            request: `evaluate` (`worker/main`).

        Raises:
            TaskBroken, TaskMismatch, OSError: as in one process; on all ranks.
        """
        local, where = self._here.local_of(request, request.get("version") or 0), request["split"]
        if why_not := together(self._ranks, lambda: self._here.why_not(where, local)):
            return {"statistics": None, "reason": why_not}
        model, data, mesh = self._the_model(request, local), self._here.dataset(where), self._plan.mesh
        self._load(model, local, request)
        rows = self._rows_of(local)
        size = EVALUATED_AT_ONCE if rows is None else rows * mesh.dp
        rank = 0 if self._axes is None else self._axes.dp_rank
        context = self._context(request, site=None if where == "server" else self._here.site)
        with within(context):
            if where != "server" and (client := self._client(model, local, context, request)):
                client.load_evaluated()
        with within(context), seeded(model_seed(request)):
            batches = loader_in_order(data, batch_size=size, num_ranks=mesh.dp, rank=rank, device=self._device)
            found = statistics(model.engine, self._here.task, batches, self._ranks, model.tally.check)
        self._check_frozen(model)
        return {"statistics": sound(self._here.task.metrics, found)}

    def statistics(self, request: Json, deadline: Deadline) -> Json:
        """Return the statistics of the site's data, from rank 0 alone: the others continue at once.

        Args:
            request: `statistics` (`worker/main`).
            deadline: the deadline of the answer.
        """
        self._here.local_of(request, 1)  # takes the options of the request
        if not self._ranks.is_first:
            return {}
        return {"statistics": self._here.statistics(request, deadline).plain()}

    def mask(self, request: Json, streams: Sequence[Sequence[Any]]) -> Json:
        """Mask the parts of an encoded update.

        Args:
            request: `mask` (`mesh_client/main`).
            streams: keys with their signs, at rank 0.

        Raises:
            OSError, RankFailed: a part is damaged, or cannot be read or written; on all ranks.
        """
        return mask_parts(request, streams, self._ranks)

    def _check(self, local: Local, algorithm: str) -> None:
        check_training(self._here.task, algorithm, local)
        if self._fitting == (self._here.task, local, algorithm):
            return
        if faults := faults_of_mesh(self._here.task, local, algorithm, self._plan):
            raise TaskBroken(*faults)
        self._fitting = self._here.task, local, algorithm

    def _training_data(self) -> Any:
        dataset = self._here.training_data()
        if len(dataset) < 1:
            raise TaskBroken("the data set is empty; a site needs at least one example to train")
        return dataset

    def _outline(self) -> nn.Module:
        """Return the task's model on the meta device, without memory."""
        if self._outlined is None or self._outlined[0] is not self._here.task:
            self._outlined = self._here.task, outline_of(self._here.task)
        return self._outlined[1]

    def _layout(self) -> Layout:
        model = self._outline()
        stays = names_that_stay(model, self._here.local.keep)
        tensors = [Tensor(name, dtype, shape) for name, (shape, dtype) in forms_of(model).items()]
        if self._here.algorithm == "scaffold":
            trained = Outline.of(model).trained
            tensors += [Tensor(CONTROL + name, "F32", shape) for name, shape in trained if name not in stays]
        if self._here.task.algorithm is not None:
            tensors += form_of_shared(self._here.task.algorithm.shared(model))
        return in_order(tensor for tensor in tensors if tensor.name not in stays)

    def _check_hooks(self, local: Local, context: Context) -> None:
        """Try the hooks of the task's algorithm, in the circumstances of a training.

        Raises:
            TaskBroken: this mesh would not compute what one process does; on all ranks.
        """
        if self._here.task.algorithm is None or self._axes is None or not self._plan.is_divided:
            return
        task = self._here.task
        if self._tried is None or self._tried[0] is not task:
            self._tried = task, places_of(outline_of(task), self._plan, self._axes), set()
        _, places, known = self._tried
        if (local, context.version) in known:
            return
        trial = HooksTrial(task, local, self._outline(), self._plan.mesh.size)
        self._ranks.raise_if_any(trial.faults_on(places, self._plan.mesh, context), TaskBroken)
        known |= {(local, context.version + number) for number in range(ROUNDS)}

    def _client(self, model: MeshModel, local: Local, context: Context, request: Json) -> MeshClient | None:
        """Return the client of the task's algorithm, with the loaded model; None: it has none.

        Raises:
            TaskMismatch, TaskBroken, OSError: as `client_of`; on all ranks.
        """
        version, own = Path(request["model"]), Path(request["own"]) if request.get("own") else None
        return together(
            self._ranks, lambda: client_of(self._here.task, self._outline(), model, local, context, version, own)
        )

    def _the_model(self, request: Json, local: Local) -> MeshModel:
        """Return the run's model, which is built at the first request.

        Raises:
            TaskMismatch: the frozen tensors, which are not exchanged, differ from the coordinator's.
        """
        self._left.restore()
        task, seed, rows = self._here.task, model_seed(request), self._rows_of(local)
        key, begins = (task, seed, rows, local.keep), local.keep is not None and self._own_of(request, local) is None
        if self._model is None or self._built_for != key or (begins and not self._model.is_new):
            self._model = None
            here = Here(self._plan, self._axes, self._device, self._ranks)
            fills, borrowed = local.keep is not None, self._borrowed()
            self._model = build(task, here, seed=seed, rows=rows, is_filled=fills, borrowed=borrowed)
            self._built_for = key
        frozen = self._model.frozen
        self._here.check_frozen(request, lambda: frozen.digest(self._ranks, self._is_first_here, self._bases))
        return self._model

    def _check_buffers(self, model: MeshModel) -> None:
        """Check that training has changed no frozen tensor, and no buffer by a rank's examples.

        Raises:
            TaskBroken: some have changed; on all ranks; the message has their names.
        """
        self._check_frozen(model)
        self._ranks.raise_if_any(model.faults_of_buffers(), TaskBroken)

    def _check_frozen(self, model: MeshModel) -> None:
        """Check that the frozen tensors are unchanged since they were built; if not, the next request rebuilds them.

        Raises:
            TaskBroken: some have changed; on all ranks; the message has their names.
        """
        try:
            together(self._ranks, model.unchanged.check)
        except TaskBroken:
            self._model = None
            raise

    def _borrowed(self) -> list[str]:
        """Find the blocks whose parameters a forward pass uses outside of their calls, once for a task and its options.

        Returns:
            The borrowed blocks.

        Raises:
            TaskBroken: the mesh would not compute what one process does; on all ranks.
        """
        task = self._here.task

        def borrowed() -> list[str]:
            data = self._here.dataset("train") if needs_trials(self._plan) else None
            if data is None or not len(data):
                return []
            return try_on_mesh(task, self._plan, 0, data, is_site=True, tells=self._ranks.is_first)

        if self._looked is None or self._looked[0] is not task:
            self._looked = task, together(self._ranks, borrowed)
        return self._looked[1]

    def _own_of(self, request: Json, local: Local) -> Path | None:
        """Return the file of the layers that stay at the site; None: it has none yet."""
        own = Path(request["own"]) if request.get("own") else None
        if local.keep is None or own is None:
            return None
        stays = names_that_stay(self._outline(), local.keep)
        return own if any(tensor.name in stays for tensor in parse_header(own)[0]) else None

    def _load(self, model: MeshModel, local: Local, request: Json) -> None:
        """Load the values of a version, and of the layers that stay at the site, into the model.

        Raises:
            TaskMismatch, OSError: as `MeshModel.load`; on all ranks.
        """
        version = Path(request["model"])

        def load() -> None:
            stays = names_that_stay(self._outline(), local.keep)
            if travelled := sorted(stays & {tensor.name for tensor in parse_header(version)[0]}):
                raise TaskMismatch(
                    f"local.keep keeps {', '.join(travelled)} at the site, but the global model has them"
                )
            model.load(version, stays, self._own_of(request, local))

        together(self._ranks, load)

    def _rows_of(self, local: Local) -> int | None:
        """Return the examples of a rank's largest batch in a pipeline, whose stages exchange one shape; else None.

        A site without training examples only evaluates.
        """
        dp = self._plan.mesh.dp
        if self._plan.mesh.pp == 1:
            return None
        examples = together(self._ranks, lambda: len(self._here.training_data())) or EVALUATED_AT_ONCE
        sizes = batch_sizes(examples, local.batch_size, model=self._outline())
        return share(max(sizes), dp - 1, dp)

    def _begin(
        self, model: MeshModel, local: Local, algorithm: str, request: Json, context: Context
    ) -> MeshClient | None:
        """Begin a round: the values of the version, a new optimizer, the algorithm's change of gradients.

        Returns:
            The client of the task's algorithm, which has begun; None: it has none.
        """
        reached("crew.filling")
        version, own = Path(request["model"]), Path(request["own"]) if request.get("own") else None
        self._load(model, local, request)
        model.is_new = False
        make = optimizer_of(local)
        begin_again(model.engine, Optimization(loss=model.tally, make_optimizer=make, clip_norm=local.clip_norm))
        model.tally.begin()
        if local.prox_mu:
            model.engine.amend = pull(model.shards(), local.prox_mu)
        if algorithm == "scaffold":
            shards = [shard for shard in model.shards() if shard.share.name not in model.stays]
            corrections = together(self._ranks, partial(corrections_of, shards, version, own))
            model.engine.amend = correct(shards, corrections)
        if local.keep_optimizer and own is not None:
            together(self._ranks, partial(give_state, model.shards(), local, own))
        client = self._client(model, local, context, request)
        if client is not None:
            if request.get("has_counted"):
                client.check_state()
            model.engine.amend = in_turn(model.engine.amend, client.change_gradients)
            client.begin()
        return client

    def _context(self, request: Json, **circumstances: Any) -> Context:
        """Return the context of a request's job, with noise of this rank: other rows need other noise."""
        context = self._here.context(request, **circumstances)
        if self._axes is not None:
            context.noise.narrow("rank", self._axes.draw)
        return context

    def _seed(self, seed: int) -> None:
        """Seed the random numbers of the model: as in one process, or differently on each rank."""
        seed_everything(seed)
        if self._axes is not None:
            seed_generators(seed, 0, self._axes.draw)


def _normalizer(work: Work, algorithm: str) -> Json:
    if algorithm != "fednova" or work.normalizer is None:
        return {}
    return {"normalizer": work.normalizer.normalizer, "effective_steps": work.normalizer.effective_steps}


def pull(shards: Sequence[Shard], mu: float) -> Callable[[], None]:
    """Return FedProx's change: μ (w - w_global) is added to each gradient (Li et al. 2020, Algorithm 2).

    Args:
        shards: the shards with the global values; they are copied.
        mu: μ.
    """
    starts = [local(shard.parameter.detach()).clone() for shard in shards]

    @torch.no_grad()
    def amend() -> None:
        for shard, start in zip(shards, starts, strict=True):
            parameter = shard.parameter
            if parameter.grad is not None:
                local(parameter.grad).add_(local(parameter.detach()) - start, alpha=mu)

    return amend


def in_turn(first: Callable[[], None] | None, second: Callable[[], None]) -> Callable[[], None]:
    """Return the change that applies both, one after the other."""

    def amend() -> None:
        if first is not None:
            first()
        second()

    return amend


def correct(shards: Sequence[Shard], corrections: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return SCAFFOLD's change: c - c_i is added to each gradient (`training.local.scaffold`).

    Args:
        shards: the shards of the trained parameters.
        corrections: c - c_i of each, of its shape.
    """

    @torch.no_grad()
    def amend() -> None:
        for shard, correction in zip(shards, corrections, strict=True):
            parameter = shard.parameter
            if parameter.grad is None:  # no part of this loss: its gradient is zero
                parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).add_(correction)

    return amend

"""The bench of a `Task`: the task with one site's data and its model, both kept from one request to the next."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from atoll.task.array_task import Trained
from atoll.task.arrays import Arrays, check_like
from atoll.task.context import Context, context_of, within
from atoll.task.deadline import Deadline
from atoll.task.errors import TaskBroken, TaskMismatch
from atoll.task.local import Local
from atoll.task.metrics import Metrics, Statistics
from atoll.task.randomness import repeat_on
from atoll.task.task import Task
from atoll.tensors import safetensors_file
from atoll.tensors.layout import CONTROL, SHARED, STATE, Tensor, in_order
from atoll.training.base.loading import tensors_of
from atoll.training.base.peft_models import adapter_of, note_of
from atoll.training.data.draws import drawing
from atoll.training.local.algorithms import check_training
from atoll.training.local.client import TrainingClient, first_shared, tensors_with
from atoll.training.local.kept_optimizer import KeptOptimizer
from atoll.training.local.local_layers import names_that_stay
from atoll.training.local.scaffold import ControlVariates, split
from atoll.training.local.training import PrivateClient, evaluate, make_optimizer, train_locally
from atoll.training.model.as_built import AsBuilt
from atoll.training.model.frozen import Unchanged, frozen_digest, frozen_tensors
from atoll.training.model.parameters import (
    aliases_of,
    buffers_of,
    build_model,
    first_parameters,
    initial_parameters,
    load_parameters,
    parameters_of,
    state_of,
    trained_by_name,
    update_of,
)
from atoll.training.private.checks import Engine
from atoll.training.private.local_steps import PrivateSteps, PrivateTerms, check_model, training_key
from atoll.training.statistics.parts import SiteStatistics
from atoll.training.worker.bench import ONE_JOB, PROCESS, Json, Measures, Outcome, Received
from atoll.training.worker.left_behind import LeftBehind, restored
from atoll.training.worker.site_task import SiteTask, device_of, model_seed
from atoll.training.worker.warm_start import Aliases


@dataclass(frozen=True, slots=True)
class _Tried:
    """A model that was tried for private steps, and the way to its example gradients."""

    task: Task
    model: torch.nn.Module
    clip_norm: float
    engine: Engine

    def fits(self, task: Task, model: torch.nn.Module, clip_norm: float) -> bool:
        """Return whether this is the trial of a model with a task and a clip norm."""
        return self.task is task and self.model is model and self.clip_norm == clip_norm


class ModelBench:
    """The bench of a `Task` (task loaded with a site's data); see `bench.Bench`."""

    grows = False

    def __init__(self, task: Task, request: dict[str, Any]) -> None:
        if request.get("threads"):
            torch.set_num_threads(request["threads"])
        self._here = SiteTask(task, request)
        self._device = device_of(request)
        repeat_on(self._device)
        self._bases = Path(request["bases"]) if request.get("bases") else None
        self._model: torch.nn.Module | None = None
        self._new: tuple[Task, int, torch.nn.Module] | None = None
        self._built_for, self._seed, self._digest = task, 0, ""
        local = self._here.local
        if local.has_custom_optimizer:  # its faults are told before a round
            with within(context_of(self._here.task)):
                make_optimizer(local, [p for p in build_model(task, 0).parameters() if p.requires_grad])
        elif self._here.site is not None:  # torch imports a third of itself with the first optimizer: before a round
            make_optimizer(local, [torch.nn.Parameter(torch.zeros(1))])
        self._has_one_job = request.get("warm") == ONE_JOB
        self._left = LeftBehind(self._here.task, local) if request.get("warm") == PROCESS else None
        self._tried: _Tried | None = None

    def visit(self, site: str) -> None:
        """Switch to another site, with the same model; the site's data are reread."""
        self._here = self._here.at(site)

    @property
    def metrics(self) -> Metrics:
        """The task's metrics."""
        return self._here.task.metrics

    def initial(self, seed: int) -> Arrays:
        """Return a new model's tensors without the local layers; for SCAFFOLD also the server's variate, 0."""
        model = self._new_model(seed)
        if self._here.is_private:
            check_model(model)
        stays = names_that_stay(model, self._here.local.keep)
        arrays = {name: array for name, array in first_parameters(self._here.task, model).items() if name not in stays}
        if self._here.algorithm == "scaffold":
            arrays |= {CONTROL + name: np.zeros_like(arrays[name]) for name in trained_by_name(model) if name in arrays}
        return arrays | first_shared(self._here.task, model)

    def frozen(self, seed: int) -> str:
        """Return the digest of the frozen tensors, which are not exchanged; empty: the model has none."""
        return frozen_digest(self._new_model(seed), self._bases)

    def adapter(self, seed: int) -> str:
        """Return the note on the PEFT adapter of the model, for the headers of versions; empty: it has none."""
        model = self._new_model(seed)
        return note_of(adapter_of(model, state_of(model)))

    def write_whole(self, out: Path, version: Path | None, seed: int, only: Sequence[str]) -> None:
        """Write tensors of the newly built model, or with a version's values; empty `only`: all.

        Raises:
            TaskBroken: layers of the model are at the sites.
            TaskMismatch: the version belongs to another model.
        """
        if self._here.local.keep is not None:
            keep = self._here.local.keep
            raise TaskBroken(f"the layers of local.keep ({keep}) are at the sites: no model is complete here")
        model, self._new = self._new_model(seed), None
        if version is not None:
            load_parameters(model, split(safetensors_file.mapped(version))[0])
        tensors = {name: tensor.detach().contiguous() for name, tensor in tensors_of(model)[0].items()}
        save_file({name: tensors[name] for name in only or tensors}, out, metadata={"format": "pt"})

    def settings(self) -> list[str]:
        """Return the names of the site's settings that the task declares."""
        return list(self._here.task.settings)

    def aliases(self) -> Aliases:
        """Return the names of the tied tensors of the model."""
        return aliases_of(self._any_model())

    def buffers(self) -> list[str]:
        """Return the names of the model's untrained float tensors, without the local layers."""
        model = self._any_model()
        stays = names_that_stay(model, self._here.local.keep)
        return [name for name in buffers_of(model) if name not in stays] + [*first_shared(self._here.task, model)]

    def num_examples(self) -> int | None:
        """Return the size of the training split; None without a site."""
        return self._here.num_examples()

    def try_out(self) -> None:
        """Try the task on a batch of its data; errors as in `SiteTask.try_out`."""
        self._here.try_out(self._device)

    def train(self, arrays: Received, request: Json, deadline: Deadline) -> Outcome:
        """Train with the built-in loop, or with the task's `fit`."""
        local = self._here.local_of(request, (request.get("version") or 0) + 1)
        algorithm, terms = request.get("algorithm") or "fedavg", self._here.private_of(request)
        check_training(self._here.task, algorithm, local)
        dataset, model = self._here.training_data(), self._the_model(request)
        before, stays = self._merged(arrays, local, request, model)
        load_parameters(model, before)
        control = _control_variates(model, arrays, stays) if algorithm == "scaffold" else None
        kept = KeptOptimizer(local, arrays.own) if local.keep_optimizer else None
        context = self._here.context(request, round=request.get("round_id") or 0, deadline=deadline)
        with within(context):
            client = self._client(arrays, model, local, context)
            if client is not None and request.get("has_counted"):
                client.check_state()
            private = None if terms is None else self._private_steps(terms, model, dataset, local, request)
            work = train_locally(
                self._here.task,
                model,
                dataset,
                local,
                seed=request["seed"],
                deadline=deadline,
                device=self._device,
                algorithm=control or client or (kept if private is None else PrivateClient(private, kept)),
            )
        self._check_frozen()
        update, report = update_of(before, model), Json(steps=work.steps)
        own = {name: array for name, array in parameters_of(model).items() if name in stays} if stays else {}
        update = {name: array for name, array in update.items() if name not in stays}
        if control:
            sent, stored = control.after(update, num_steps=work.steps, lr=local.lr)
            update, own = update | sent, own | stored
        if kept:
            own |= kept.arrays()
        if client:
            update = {name: array for name, array in update.items() if name not in client.leaves_out}
            update, own = update | client.sent(), own | client.kept()
        if algorithm == "fednova" and (counted := work.normalizer):
            report |= {"normalizer": counted.normalizer, "effective_steps": counted.effective_steps}
        return Outcome(Trained(update, work.num_examples, work.statistics, work.work), report, own)

    def _private_steps(
        self, terms: PrivateTerms, model: torch.nn.Module, dataset: Any, local: Local, request: Json
    ) -> PrivateSteps:
        """Return the private steps of a training, with the key that the agent has derived for it.

        A model is tried once with each task and clip norm: what the trial finds does not depend on its values.
        """
        task = self._here.task
        is_tried = self._tried is not None and self._tried.fits(task, model, terms.example_norm)
        tried = self._tried if is_tried else None
        private = PrivateSteps(
            terms,
            task,
            model.to(self._device).train(),
            dataset,
            local,
            key=training_key(request),
            seed=request["seed"],
            gradients=None if tried is None else tried.engine,
        )
        self._tried = _Tried(task, model, terms.example_norm, private.engine)
        return private

    def evaluate(self, arrays: Received, request: Json) -> Statistics | str:
        """Evaluate on the site's split with its local layers, or on the server's data."""
        local, where = self._here.local_of(request, request.get("version") or 0), request["split"]
        if why_not := self._here.why_not(where, local):
            return why_not
        model, dataset = self._the_model(request), self._here.dataset(where)
        load_parameters(model, self._merged(arrays, local, request, model)[0])
        context = self._here.context(request, site=None if where == "server" else self._here.site)
        with within(context):
            if where != "server" and (client := self._client(arrays, model, local, context)):
                client.load_evaluated()
            found = evaluate(self._here.task, model, dataset, device=self._device, seed=model_seed(request))
        self._check_frozen()
        return found

    def _client(
        self, arrays: Received, model: torch.nn.Module, local: Local, context: Context
    ) -> TrainingClient | None:
        """Return the client of the task's algorithm, with the loaded model; None: the task has no algorithm."""
        if self._here.task.algorithm is None:
            if unknown := [name for name in arrays.version if name.startswith(SHARED)]:
                raise TaskMismatch(f"{', '.join(unknown)} is unknown: the task has no custom algorithm")
            return None
        return TrainingClient(
            self._here.task,
            model,
            local,
            context,
            shared=tensors_with(SHARED, arrays.version, self._device),
            state=tensors_with(STATE, arrays.own or {}, self._device) or None,
            data=lambda: (drawing(self._here.training_data(), context.seed), len(self._here.training_data())),
        )

    def measures(self) -> Measures:
        """Return the names of the loss and the task's metrics, and whether the server has data for them."""
        return self._here.measures()

    def statistics(self, request: Json, deadline: Deadline) -> SiteStatistics:
        """Return the statistics of the rows of both splits, and of the task's function."""
        return self._here.statistics(request, deadline)

    def no_statistics(self) -> str:
        """Return "": rows always have statistics."""
        return ""

    def is_empty(self, split: str) -> bool:
        """Return whether the data set of this split exists and has no examples."""
        return self._here.is_empty(split)

    def _new_model(self, seed: int) -> torch.nn.Module:
        """Return a model in its first state for a seed; the last model, if it has that seed."""
        task = self._here.task
        if self._new is None or self._new[0] is not task or self._new[1] != seed:
            self._new = None  # before a second one takes memory
            self._new = task, seed, build_model(task, seed)
            if self._left is not None:  # `task.model()` may give its parameters to the loss
                self._left = LeftBehind(task, self._here.local)
        return self._new[2]

    def _any_model(self) -> torch.nn.Module:
        """Return the last model, or a new one; its values do not matter."""
        return self._model if self._model is not None else self._new[2] if self._new else self._new_model(0)

    def _the_model(self, request: Json) -> torch.nn.Module:
        """Return the run's model; its state that is not exchanged is as after its construction."""
        task, seed = self._here.task, model_seed(request)
        if self._left is not None:
            self._left.restore()
        if self._model is not None and not self._is_restored(self._model):
            self._model = None  # some of its state cannot be restored
        if self._model is None or self._built_for is not task or self._seed != seed:
            self._model = None  # before a second one takes memory
            self._built_for, self._seed, self._digest = task, seed, ""
            self._model, self._new = self._new_model(seed).to(self._device), None
            filled = self._model.state_dict(keep_vars=True).values()
            self._as_built = AsBuilt({} if self._has_one_job else {"": self._model}, filled)
            self._unchanged = Unchanged(partial(frozen_tensors, self._model))
        self._here.check_frozen(request, partial(self._digest_of, self._model))
        return self._model

    def _is_restored(self, model: torch.nn.Module) -> bool:
        """Restore the model's state from before the last job; return whether all of it could be restored."""
        model.to(self._device)
        return restored(self._as_built)

    def _check_frozen(self) -> None:
        """Check that the frozen tensors are unchanged; otherwise the next request builds another model.

        Raises:
            TaskBroken: some have changed; the message has their names.
        """
        if self._here.task.fit is not None:  # a custom loop may move a model to another device and back
            if not self._unchanged.has_same_values():
                self._model = None
            return
        try:
            self._unchanged.check()
        except TaskBroken:
            self._model = None
            raise

    def _digest_of(self, model: torch.nn.Module) -> str:
        """Return the digest of the frozen tensors of the run's model; it is computed once."""
        self._digest = self._digest or frozen_digest(model, self._bases)
        return self._digest

    def _merged(
        self, arrays: Received, local: Local, request: Json, model: torch.nn.Module
    ) -> tuple[Arrays, frozenset[str]]:
        """Return a version's tensors with the site's local layers (initial before a training), and their names."""
        version, stays = split(arrays.version)[0], names_that_stay(model, local.keep)
        if travelled := sorted(stays & version.keys()):
            raise TaskMismatch(f"local.keep keeps {', '.join(travelled)} at the site, but the global model has them")
        own = split(arrays.own or {})[0]
        if stays and not own:
            own = initial_parameters(self._here.task, model_seed(request))
            if self._left is not None:  # the construction of that model may have given its parameters to the loss
                self._left.restore()
        return version | {name: array for name, array in own.items() if name in stays}, stays


def _control_variates(model: torch.nn.Module, arrays: Received, stays: frozenset[str]) -> ControlVariates:
    server, client = split(arrays.version)[1], split(arrays.own or {})[1]
    trained = {name: p for name, p in trained_by_name(model).items() if name not in stays}
    for variates in (server, client) if client else (server,):
        check_like(variates, in_order(Tensor(name, "F32", tuple(p.shape)) for name, p in trained.items()))
    return ControlVariates(server, client or None)

"""The trainer of the batched engine: many clients as one group, each with the examples and order that it has alone.

Results agree with the sequential engine to about 1e-6, which `probe` checks at the start.
"""

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from atoll.simulations.engines.batched.concatenation import concatenated, of_one_kind
from atoll.simulations.engines.batched.dropout import Masks
from atoll.simulations.engines.batched.factors import pay
from atoll.simulations.engines.batched.hooks import HookRefused, Hooks, LooksAtBatch
from atoll.simulations.engines.batched.mapped_client import SharedContext
from atoll.simulations.engines.batched.measures import Losses, Measured, UnitsOfEach, metrics_of
from atoll.simulations.engines.batched.nets import Net
from atoll.simulations.engines.batched.outputs import activation_bytes
from atoll.simulations.engines.batched.probe import Alone, Probe
from atoll.simulations.engines.batched.schedule import Batch, Schedule
from atoll.simulations.engines.batched.shared import BATCH_NORMS, Running, running_of
from atoll.simulations.engines.batched.stack import CannotBatch, Stack, is_plain
from atoll.simulations.engines.batched.swapping import obstacles_to_batching
from atoll.simulations.engines.benches import Benches
from atoll.simulations.engines.engine import Failed, Job, Trained, Training, last_line, naming
from atoll.simulations.engines.examples import Examples
from atoll.simulations.engines.loop import Loop, report_of, requested_steps
from atoll.simulations.engines.rows import Columns, Rows
from atoll.task.arrays import Arrays
from atoll.task.context import depends_on_context, within
from atoll.task.errors import NotFinite
from atoll.task.task import Task
from atoll.tensors.layout import BESIDE, STATE
from atoll.training.data.batches import batch_sizes
from atoll.training.local.scaffold import ControlVariates, split
from atoll.training.model.parameters import build_model, integer_difference, trained_by_name

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

AT_ONCE_MAX = 128
"""Maximum number of clients in a group; more do not make it faster, whatever their model size."""

STACK_BYTES = 4 << 20
"""Maximum size of all clients' weights in a group, which should stay in the cache between steps [bytes]."""

ROWS_BYTES = 32 << 20
"""Maximum size of the updates of a window [bytes]; each process has several windows in memory."""

ACTIVATION_BYTES = 16 << 20
"""Maximum size of all layers' outputs in a step of all clients [bytes], which a CPU's backward should find in the
cache."""

ADAPTIVE = ("adam", "adamw")
"""Optimizers that turn a gradient of rounding errors alone, such as the gradient of an attention's key bias, into a
whole step; for these, equal gradients do not imply equal steps."""

PADDED_MAX = 3
"""Maximum ratio of the padded size of a group to the total size of its clients' batches."""


class Steps(Protocol):
    """The steps of a group of clients; see `Schedule`."""

    requested: list[int]
    """The steps of each job's training without a deadline."""

    steps: list[int]
    """The steps that each job takes."""

    @property
    def order(self) -> list[int]:
        """The index of the job of each row."""
        ...

    @property
    def length(self) -> int:
        """The largest number of a client's examples over all steps."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of all steps."""
        ...


class GroupNet(Protocol):
    """The model of a group, with the clients' weights; see `Net`."""

    stack: Stack
    running: Running

    def load(self, version: Arrays) -> None:
        """Load the tensors of a version that are not trained: buffers, frozen layers."""
        ...

    def begin(self, start: torch.Tensor, corrections: torch.Tensor | None, *, clients: int, length: int) -> None:
        """Set the weights of a new group of clients."""
        ...


class BatchTrainer:
    """Trainer of windows, the parts of a cohort, in groups of many clients.

    Args:
        training: the settings of all clients' training.
        at_once: the number of clients in a group (k); None: as many as fit into the cache.
        kind: the kind of net; None: the first kind that supports the model and agrees with the sequential engine.

    Raises:
        CannotBatch: no kind of net supports the model; the message lists each kind's reason.
    """

    def __init__(self, training: Training, *, at_once: int | None = None, kind: str | None = None) -> None:
        if not isinstance(training.task, Task) or training.task.fit is not None:
            raise CannotBatch("the task has a custom training")
        if training.task.algorithm is not None and training.local.keep is not None:
            raise CannotBatch("the task has a custom algorithm, and local.keep keeps layers at the clients")
        if training.local.keep_optimizer:
            raise CannotBatch("local.keep_optimizer keeps the state of each client's optimizer")
        self._training, self._task, self._local = training, training.task, training.local
        if self._local.has_custom_optimizer:
            raise CannotBatch(f"the task's local optimizer, {self._local.optimizer_name}, is not built in")
        self._has_context = depends_on_context(training.task)
        self._loop = Loop(training)
        self._hooks = Hooks(training) if training.task.algorithm is not None else None
        has_bench = self._hooks is not None or training.is_private
        self._alone: Alone = Benches(training) if has_bench else self._loop
        self.form = self._loop.form
        self._sizes: dict[tuple[int, int | None], list[int]] = {}
        self._layout()
        self._wanted, self._activation_bytes = at_once, self._activations_of_one()
        own_loss = self._hooks.losses if self._hooks is not None and self._hooks.has_loss else None
        self._losses, self._metrics = Losses(self._task.loss, own_loss), metrics_of(self._task.metrics)
        self._units = UnitsOfEach(self._loop.units)
        self._version: Arrays = {}
        self.masks = Masks(training.device)
        """Random generators of the clients."""
        if kind is None:
            self._choose()
        else:
            self.take(kind)

    def _choose(self) -> None:
        """Switch to the first kind of net that supports the model and agrees with the sequential engine."""
        if self._local.optimizer in ADAPTIVE:
            plain = BatchTrainer(_with_plain_steps(self._training), at_once=self._wanted)
            self.masks = plain.masks
            self.take(plain.kind)
            return
        Probe(self, self._training, self._loop, self._alone, self._resting).choose_kind()
        self.masks.settle()

    def take(self, kind: str) -> None:
        """Switch to a net of this kind; raise CannotBatch if it does not support the model."""
        self.at_once = self._wanted or self._fitting(kind)
        model = build_model(self._task, self._training.model_seed).to(self._training.device).train()
        self._whole = Net(kind, model, self._losses, self._local, self._places, self.at_once, self.masks, self._hooks)
        self._net: GroupNet = self._whole
        self.kind = kind

    def window(self, num_jobs: int) -> int:
        """Return the clients of one to four groups: larger cohorts have larger windows, whose batches fit better."""
        products = -(-num_jobs // self.at_once)
        even = max(1, -(-num_jobs // max(1, products)))
        return even * max(1, min(4, products // 16, ROWS_BYTES // (even * self._row_bytes())))

    def begin(self, version: Arrays, number: int = 0) -> None:
        """Set the version that the next clients train from."""
        if (training := self._training.at(number)) is not self._training:
            self._training, self._local = training, training.local
            self.take(self.kind)
        self._loop.begin(version, number)
        if self._alone is not self._loop:
            self._alone.begin(version, number)
        if self._hooks is not None:
            self._hooks.begin_round(version, self._local)
        self._version = split(version)[0]
        every = [self._version.get(name, np.zeros(shape, np.float32)).reshape(-1) for name, _, shape in self._places]
        self._start = np.concatenate(every)[None]
        self._net.load(self._version)

    def train(self, jobs: Sequence[Job], rows: Rows) -> Iterator[Trained | Failed]:
        """Train a window's clients in groups; train a client alone if its examples do not fit into one."""
        results: dict[int, Trained | Failed] = {}
        examples = []
        for job in jobs:
            with naming(job.client_id):
                examples.append(self._examples_of(job))
        together = of_one_kind(examples)
        together.sort(key=lambda index: -self._num_steps(jobs[index], examples[index]))
        for first in range(0, len(together), self.at_once):
            for chosen in self._parts(together[first : first + self.at_once], examples):
                try:
                    results |= self.product(chosen, jobs, examples, rows)
                except HookRefused as refused:  # from a branch that the trial did not reach
                    logger.warning("%d clients are trained one by one: %s", len(chosen), refused)
                except CannotBatch:  # caused by the examples of some clients
                    continue
                except Exception as error:  # training the clients one by one shows which one fails
                    logger.warning("%d clients are trained one by one: %s", len(chosen), last_line(error))
        for index, job in enumerate(jobs):
            if index not in results:
                with naming(job.client_id):
                    results[index] = self._alone.one(job, rows, index)
            yield results[index]

    def product(
        self, chosen: Sequence[int], jobs: Sequence[Job], examples: Sequence[Examples], rows: Rows
    ) -> dict[int, Trained | Failed]:
        """Train the clients of the chosen jobs as one group; return their results by the index of the job."""
        while True:
            with suppress(LooksAtBatch):  # now it is known which hook looks at batches
                return self._product(chosen, jobs, examples, rows)

    def _product(
        self, chosen: Sequence[int], jobs: Sequence[Job], examples: Sequence[Examples], rows: Rows
    ) -> dict[int, Trained | Failed]:
        placed, tensors, offsets = concatenated([examples[index] for index in chosen])
        schedule = self._schedule([jobs[index] for index in chosen], placed, offsets)
        members = [chosen[at] for at in schedule.order]
        states = self._states([jobs[index] for index in members])
        start = self._starts([layers for layers, _ in states])
        corrections = self._corrections([control for _, control in states])
        begun = torch.from_numpy(start).to(self._training.device)
        self._net.begin(begun, corrections, clients=len(chosen), length=schedule.length)
        self._net.running.begin(self._version, [layers for layers, _ in states])
        self.masks.begin([jobs[index].seed for index in members], is_shuffled=self._local.shuffle)
        context = SharedContext(self._task, jobs[members[0]])
        with within(context) if self._has_context or self._hooks else nullcontext():
            if self._hooks is not None:
                self._hooks.begin(context, self._whole, [jobs[index].own for index in members])
            measured = self._run(schedule, tensors, len(chosen))
            if self._hooks is not None:
                self._hooks.end([schedule.steps[at] for at in schedule.order])
        statistics = [{}] * len(chosen) if measured is None else measured.statistics()
        units = None if measured is None else measured.units()
        results: dict[int, Trained | Failed] = {}
        with np.errstate(over="ignore", invalid="ignore"):
            written = self._written_together(rows, members)
            trained = [] if written else self._trained(len(chosen))
            running = self._net.running.arrays()
            for row, (at, index) in enumerate(zip(schedule.order, members, strict=True)):
                done = schedule.steps[at]
                update, own = written[row] if written else Arrays(), Arrays()
                if not written:
                    each = [block[row] for block in trained]
                    began = start[min(row, len(start) - 1)]
                    self._write_running(rows, index, {name: every[row] for name, every in running.items()})
                    try:
                        if self._hooks is not None:
                            self._hooks.write(row, rows.update_of(index), rows.own_of(index))
                        update, own = self._write(rows, index, each, began, *states[row], done)
                    except NotFinite as error:
                        results[index] = Failed(jobs[index].client_id, "not_finite", str(error))
                        continue
                results[index] = Trained(
                    jobs[index].client_id,
                    update,
                    examples[index].count if units is None else self._weight(units[:done, row], examples[index].count),
                    done / schedule.requested[at],
                    statistics[row],
                    own,
                    report_of(self._training, done),
                    rows.update[index],
                    rows.largest[index] if written else None,
                )
        return results

    def _parts(self, chosen: Sequence[int], examples: Sequence[Examples]) -> Iterator[Sequence[int]]:
        """Yield the clients of each group; clients with far wider batches than the others get a separate one."""
        widths = {index: self._width(examples[index]) for index in chosen}
        widest = max(widths.values())
        if widest * len(chosen) <= PADDED_MAX * sum(widths.values()):
            yield chosen
            return
        yield [index for index in chosen if 2 * widths[index] > widest]
        yield from self._parts([index for index in chosen if 2 * widths[index] <= widest], examples)

    def _examples_of(self, job: Job) -> Examples:
        """Return the examples of a client, which it can train on."""
        return self._loop.examples(job.client_id)

    def _schedule(self, jobs: Sequence[Job], placed: Sequence[Examples], offsets: Sequence[int]) -> Steps:
        """Return the steps of a group; see `Schedule`."""
        return Schedule(jobs, placed, self._local, offsets, joins=self._joins)

    def _run(self, schedule: Steps, tensors: tuple[torch.Tensor, ...], clients: int) -> Measured | None:
        """Take all steps of a group; return what they measure, None: private steps measure nothing."""
        measured, net = Measured(self._metrics, clients, self._units), self._whole
        drawn = torch.default_generator.get_state()
        active = 0
        for batch in schedule:
            if active != len(batch.sizes):
                active = len(batch.sizes)
                net.stack.take(active)
            rows = batch.rows.flatten().to(self._training.device)
            inputs, targets = [tensor.index_select(0, rows) for tensor in tensors]
            if self._hooks is not None:
                self._hooks.take(inputs, targets, batch.sizes)
            losses, outputs = net.advance(inputs, targets, batch.sizes)
            measured.add(losses, outputs, targets, batch.sizes)
        if not torch.equal(drawn, torch.default_generator.get_state()):
            raise CannotBatch("the task draws random numbers in a step, and each client has its own generator")
        return measured

    def _weight(self, of_steps: Array, count: int) -> int | float:
        """Return the weight of a client's update in FedAvg, from the units of its steps."""
        if self._loop.units.function is None:  # as in `weight`, without the list of the steps
            return count
        return self._loop.units.weight(of_steps.tolist(), self._batch_sizes(count), count)

    def _trained(self, clients: int) -> list[Array]:
        """Return the trained values of each parameter (clients, n)."""
        self._net.stack.settle()
        return [self._net.stack.blocks[name][:clients].cpu().numpy() for name, _, _ in self._places]

    def _written_together(self, rows: Rows, members: Sequence[int]) -> list[Arrays]:
        """Write the rows of a group at once, if they are adjacent and hold only the change of the weights.

        Returns:
            The updates, as views; empty if they are not written, or not finite.
        """
        first, count = members[0], len(members)
        if not self._is_whole or any(index != first + row for row, index in enumerate(members)):
            return []
        together, largest = rows.update[first : first + count], rows.largest[first : first + count]
        for number, (name, columns, _) in enumerate(self._places):
            largest[:, number] = self._net.stack.moved(name, together[:, columns])
        if not np.isfinite(largest).all():  # writing row by row shows which one is not
            return []
        return rows.updates_of(first, count)

    def _write(
        self,
        rows: Rows,
        index: int,
        trained: Sequence[Array],
        start: Array,
        layers: Arrays,
        control: ControlVariates | None,
        num_steps: int,
    ) -> tuple[Arrays, Arrays]:
        """Write a client's row, with the change of its weights and its new state; return both as views."""
        update, own = rows.update_of(index), rows.own_of(index)
        if self._is_whole:
            whole = rows.update[index]
            for (_, columns, _), values in zip(self._places, trained, strict=True):
                np.subtract(values, start[columns], out=whole[columns])
        else:
            for name in self._resting:
                update[name][...] = 0
            for (name, columns, shape), values in zip(self._places, trained, strict=True):
                if name in update:
                    np.subtract(values, start[columns], out=update[name].reshape(-1))
                else:
                    own[name][...] = values.reshape(shape)
        self._loop.exchange.finish(rows, index, update, control, num_steps)
        return update, own

    def _write_running(self, rows: Rows, index: int, buffers: Arrays) -> None:
        """Write the buffers of batch norms into a client's row: as changes, or as the client's state."""
        update, own = rows.update_of(index), rows.own_of(index)
        for name, now in buffers.items():
            if name in own:
                own[name][...] = now
            elif now.dtype == np.float32:
                np.subtract(now, self._version[name], out=update[name])
            else:
                update[name][...] = integer_difference(name, now, self._version[name])

    def _states(self, jobs: Sequence[Job]) -> list[tuple[Arrays, ControlVariates | None]]:
        """Return the local layers and the control variate that each client begins with."""
        exchange = self._loop.exchange
        return [({}, None)] * len(jobs) if exchange.is_stateless else [exchange.own_of(job) for job in jobs]

    def _starts(self, layers: Sequence[Arrays]) -> Array:
        """Return the starting weights (1, T), or (k, T) if clients begin with local layers."""
        if not any(layers):
            return self._start
        start = np.repeat(self._start, len(layers), axis=0)
        for row, local in enumerate(layers):
            for name, columns, _ in self._places:
                if name in local:
                    start[row, columns] = local[name].reshape(-1)
        return start

    def _corrections(self, controls: Sequence[ControlVariates | None]) -> torch.Tensor | None:
        """Return SCAFFOLD's c - c_i (k, T); None: no SCAFFOLD."""
        if self._training.algorithm != "scaffold":
            return None
        matrix = np.zeros((len(controls), self._start.shape[1]), np.float32)
        for row, control in enumerate(controls):
            corrections = control.corrections if control else {}
            for name, columns, _ in self._places:
                if name in corrections:
                    matrix[row, columns] = corrections[name].reshape(-1)
        return torch.from_numpy(matrix).to(self._training.device)

    def _num_steps(self, job: Job, examples: Examples) -> int:
        requested = requested_steps(self._local, len(self._batch_sizes(examples.count)))
        return min(requested, job.steps or requested)

    def _width(self, examples: Examples) -> int:
        """Return the size of a client's first batch."""
        return self._batch_sizes(examples.count)[0]

    def _batch_sizes(self, count: int) -> list[int]:
        """Return the sizes of one epoch's batches of a client with this number of examples; they are cached."""
        key = count, self._local.batch_size
        if (sizes := self._sizes.get(key)) is None:
            sizes = self._sizes[key] = batch_sizes(count, self._local.batch_size, model=self._loop.model)
        return sizes

    def _layout(self) -> None:
        """Find the trained tensors: the columns of the stack, in the order of an update's."""
        model = build_model(self._task, self._training.model_seed)
        if obstacles := list(obstacles_to_batching(model)):
            raise CannotBatch("; ".join(obstacles))
        trained = trained_by_name(model)
        tensors = [t for t in (*self.form.update, *self.form.own) if not t.name.startswith((*BESIDE, STATE))]
        self._moving = running_of(model).keys()
        self._joins = any(isinstance(module, BATCH_NORMS) for module in model.modules())
        self._places = Columns(tuple(t for t in tensors if t.name in trained)).places
        self._is_whole = self._places == Columns(self.form.update).places and not self.form.own
        self._is_whole = self._is_whole and all(t.name in trained for t in self.form.update)
        fixed = [t.name for t in tensors if t.name not in trained and t.name not in self._moving]
        self._resting = [t.name for t in self.form.update if t.name in fixed]
        if fixed := [name for name in fixed if name not in self._resting]:
            raise CannotBatch(f"{', '.join(fixed)} stay at the clients and are not trained")

    def _fitting(self, kind: str) -> int:
        """Return the number of clients in a group that fit into the cache."""
        is_shared = is_plain(self._local) and self._training.algorithm != "scaffold" and self._hooks is None
        may_factor = kind == "by hand" and is_shared and self._training.device == "cpu"
        length, shapes = self._length_of_one(), [shape for _, _, shape in self._places]
        sizes = [length * sum(shape) if may_factor and pay(shape, length) else math.prod(shape) for shape in shapes]
        by_weights = STACK_BYTES // (4 * sum(sizes))
        by_activations = ACTIVATION_BYTES // self._activation_bytes
        return max(1, min(AT_ONCE_MAX, by_weights, by_activations, ROWS_BYTES // self._row_bytes()))

    def _row_bytes(self) -> int:
        """Return the size of all trained tensors of a client, including its algorithm's [bytes]."""
        if self._hooks is not None:
            return self.form.row_bytes
        return 4 * sum(math.prod(shape) for _, _, shape in self._places)

    def _length_of_one(self) -> int:
        """Return the number of examples that the first client uses over all steps; without sites, the maximum."""
        if (site := next(iter(self._task.sites), None)) is None:
            return sys.maxsize
        examples = self._loop.examples(site)
        return self._num_steps(Job(site, 0), examples) * self._width(examples)

    def _activations_of_one(self) -> int:
        """Return the size of all layers' outputs in a step of the first client [bytes]; 1 if unknown."""
        if self._training.device == "cpu" and (site := next(iter(self._task.sites), None)) is not None:
            examples = self._loop.examples(site)
            with suppress(Exception):  # `probe` finds and reports faults of the model
                batch = torch.arange(self._width(examples))
                model = build_model(self._task, self._training.model_seed)
                return max(1, activation_bytes(model, examples.fetch(0, 0, batch)[0]))
        return 1


def _with_plain_steps(training: Training) -> Training:
    """Return the same training with plain SGD, whose updates are proportional to the gradients."""
    return replace(training, overrides={**training.overrides, "optimizer": "sgd", "lr": 0.1})

"""Many clients in one product: the same examples in the same order as each takes alone, agreeing to about 1e-6.

A few clients are trained both ways at the start. So what cannot be batched (an operation without a rule, examples that
see each other, randomness in the forward) is found there, with its reason.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, cycle, islice
from typing import Any

import numpy as np
import torch

from atoll.aggregation.layout import CONTROL
from atoll.parallel.arrays import Arrays
from atoll.parallel.errors import NotFinite
from atoll.parallel.metrics import Statistics
from atoll.parallel.model_bench import ModelBench
from atoll.parallel.parameters import build_model, trained_by_name
from atoll.parallel.scaffold import ControlVariates, split
from atoll.parallel.task import Task
from atoll.simulations.engines.engine import Failed, Job, Trained, Training, naming
from atoll.simulations.engines.examples import Examples
from atoll.simulations.engines.flow import flow_bytes
from atoll.simulations.engines.loop import Loop, orders, report_of, requested_steps, seed_everything
from atoll.simulations.engines.measures import Losses, Measured, metrics_of
from atoll.simulations.engines.nets import Net
from atoll.simulations.engines.one_process import OneProcess, on_device, threads_of_torch
from atoll.simulations.engines.rows import Columns, Rows
from atoll.simulations.engines.schedule import Schedule
from atoll.simulations.engines.stack import CannotBatch
from atoll.simulations.engines.stacked_layers import obstacles_to_batching

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

AT_ONCE_MAX = 128
"""More clients gain nothing, whatever their size."""

STACK_BYTES = 4 << 20
"""Of the weights of all clients in a product: they should stay in the cache from step to step."""

FLOW_BYTES = 16 << 20
"""Of what comes out of all layers in a step of all clients: on a CPU the backward should find it in the cache."""

AGREE = 1e-3
"""How far, relative to its length, an update may be from the sequential one before it is a fault and not rounding."""

KINDS = ("by hand", "stacked", "mapped")

TRIED = 4
"""Clients that are trained both ways, in one product."""

TRIES = 3
"""Of so many clients each, until one of them has an update to compare."""

PADDED = 3
"""A product may be so many times as large as what its clients' batches hold."""


class BatchTrainer:
    """Trains windows of clients.

    Args:
        training: of all clients.
        at_once: clients in a product (k); None: as many as the cache holds.
        kind: of net; None: the first that takes the model and agrees with the sequential engine.

    Raises:
        CannotBatch: none does, with every reason.
    """

    def __init__(self, training: Training, *, at_once: int | None = None, kind: str | None = None) -> None:
        if not isinstance(training.task, Task) or training.task.fit is not None:
            raise CannotBatch("the task has a training of its own")
        self._training, self._task, self._local = training, training.task, training.local
        self._loop = Loop(training)
        self.form = self._loop.form
        self._layout()
        self.at_once = at_once or self._fitting()
        self._losses, self._metrics = Losses(self._task.loss), metrics_of(self._task.metrics)
        self._version: Arrays = {}
        if kind is None:
            self._net = self._net_that_agrees()
        else:
            self._net = self._net_of(kind)
        self.kind = self._net.kind

    def window(self, num_jobs: int) -> int:
        """Some products' clients, the more the larger the cohort: the more there are, the better they fit together."""
        products = -(-num_jobs // self.at_once)
        even = -(-num_jobs // max(1, products))
        return max(1, even * max(1, min(4, products // 16)))

    def begin(self, version: Arrays) -> None:
        """Take the version that the next clients train from."""
        self._loop.begin(version)
        self._version = split(version)[0]
        every = [self._version.get(name, np.zeros(shape, np.float32)).reshape(-1) for name, _, shape in self._places]
        self._start = np.concatenate(every)[None]
        self._net.load(self._version)

    def train(self, jobs: Sequence[Job], rows: Rows) -> Iterator[Trained | Failed]:
        """Train a window's clients; those that do not fit to the others by themselves."""
        results: dict[int, Trained | Failed] = {}
        found = []
        for job in jobs:
            with naming(job.client_id):
                found.append(self._loop.examples(job.client_id))
        together = _of_one_kind(found)
        together.sort(key=lambda index: -self._num_steps(jobs[index], found[index]))
        for first in range(0, len(together), self.at_once):
            for chosen in self._parts(together[first : first + self.at_once], found):
                try:
                    results |= self._product(chosen, jobs, found, rows)
                except CannotBatch:  # what only some clients' examples bring about
                    continue
                except Exception as error:  # its clients are trained one by one, and whose fault it is comes out
                    logger.warning("%d clients are trained one by one: %s", len(chosen), _last_line(error))
        for index, job in enumerate(jobs):
            if index not in results:
                with naming(job.client_id):
                    results[index] = self._loop.one(job, rows, index)
            yield results[index]

    def _parts(self, chosen: Sequence[int], found: Sequence[Examples]) -> Iterator[Sequence[int]]:
        """Clients for one product; where a few have far wider batches than the others, for one after the other."""
        widths = {index: self._width(found[index]) for index in chosen}
        widest = max(widths.values())
        if widest * len(chosen) <= PADDED * sum(widths.values()):
            yield chosen
            return
        yield [index for index in chosen if 2 * widths[index] > widest]
        yield from self._parts([index for index in chosen if 2 * widths[index] <= widest], found)

    def _product(
        self, chosen: Sequence[int], jobs: Sequence[Job], found: Sequence[Examples], rows: Rows
    ) -> dict[int, Trained | Failed]:
        """Train the clients of some jobs, all at once; their results by index."""
        some, tensors, offsets = _beside([found[index] for index in chosen])
        schedule = Schedule([jobs[index] for index in chosen], some, self._local, offsets)
        members = [chosen[at] for at in schedule.order]
        owns = [self._loop.exchange.own_of(jobs[index]) for index in members]
        start = self._starts([kept for kept, _ in owns])
        corrections = self._corrections([control for _, control in owns])
        self._net.begin(torch.from_numpy(start).to(self._training.device), corrections)
        statistics = self._run(schedule, tensors, len(chosen))
        blocks = self._net.stack.blocks
        trained = [blocks[name][: len(chosen)].cpu().numpy() for name, _, _ in self._places]
        results: dict[int, Trained | Failed] = {}
        with np.errstate(over="ignore", invalid="ignore"):
            are_written = self._write_together(rows, members, trained, start)
            for row, (at, index) in enumerate(zip(schedule.order, members, strict=True)):
                begun, done = start[min(row, len(start) - 1)], schedule.steps[at]
                try:
                    if are_written:
                        update, own = rows.update_of(index), rows.own_of(index)
                    else:
                        each = [block[row] for block in trained]
                        update, own = self._write(rows, index, each, begun, *owns[row], done)
                except NotFinite as error:
                    results[index] = Failed(jobs[index].client_id, "not_finite", str(error))
                    continue
                results[index] = Trained(
                    jobs[index].client_id,
                    update,
                    found[index].count,
                    done / schedule.requested[at],
                    statistics[row],
                    own,
                    report_of(self._training, done),
                    rows.update[index],
                )
        return results

    def _run(self, schedule: Schedule, tensors: tuple[torch.Tensor, ...], clients: int) -> list[Statistics]:
        measured, net = Measured(self._metrics, clients), self._net
        active = 0
        for batch in schedule:
            if active != len(batch.sizes):
                active = len(batch.sizes)
                net.stack.take(active)
            rows = batch.rows.flatten().to(self._training.device)
            inputs, targets = [tensor.index_select(0, rows) for tensor in tensors]
            losses, outputs = net.advance(inputs, targets, batch.sizes)
            measured.add(losses, outputs, targets, batch.sizes)
        return measured.statistics()

    def _write_together(self, rows: Rows, members: Sequence[int], trained: Sequence[Array], start: Array) -> bool:
        """The rows of a product, where they lie beside each other and are nothing but what the weights have moved.

        Returns:
            Whether they are written, and finite.
        """
        first, count = members[0], len(members)
        if not self._is_whole or any(index != first + row for row, index in enumerate(members)):
            return False
        together = rows.update[first : first + count]
        for (_, columns, _), values in zip(self._places, trained, strict=True):
            np.subtract(values, start[:, columns], out=together[:, columns])
        values = together.reshape(-1)
        return math.isfinite(np.dot(values, values))  # finite only if every number is; one that is not is found by row

    def _write(
        self,
        rows: Rows,
        index: int,
        trained: Sequence[Array],
        start: Array,
        kept: Arrays,
        control: ControlVariates | None,
        num_steps: int,
    ) -> tuple[Arrays, Arrays]:
        """A client's row: what its weights have moved, and what it keeps; gives both as views."""
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

    def _starts(self, kept: Sequence[Arrays]) -> Array:
        """(1, T), or (k, T) where clients begin with layers of their own."""
        if not any(kept):
            return self._start
        start = np.repeat(self._start, len(kept), axis=0)
        for row, own in enumerate(kept):
            for name, columns, _ in self._places:
                if name in own:
                    start[row, columns] = own[name].reshape(-1)
        return start

    def _corrections(self, controls: Sequence[ControlVariates | None]) -> torch.Tensor | None:
        """(k, T), c - c_i."""
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
        requested = requested_steps(self._local, -(-examples.count // (self._local.batch_size or examples.count)))
        return min(requested, job.steps or requested)

    def _width(self, examples: Examples) -> int:
        """Of a client's first batch."""
        return min(examples.count, self._local.batch_size or examples.count)

    def _layout(self) -> None:
        """Which tensors train: the columns of the stack, in the order of an update's."""
        model = build_model(self._task)
        if obstacles := list(obstacles_to_batching(model)):
            raise CannotBatch("; ".join(obstacles))
        trained = trained_by_name(model)
        tensors = [t for t in (*self.form.update, *self.form.own) if not t.name.startswith(CONTROL)]
        self._places = Columns(tuple(t for t in tensors if t.name in trained)).places
        self._is_whole = self._places == Columns(self.form.update).places and not self.form.own
        self._is_whole = self._is_whole and all(t.name in trained for t in self.form.update)
        self._resting = [t.name for t in self.form.update if t.name not in trained and not t.name.startswith(CONTROL)]
        if fixed := [t.name for t in self.form.own if t.name not in trained and not t.name.startswith(CONTROL)]:
            raise CannotBatch(f"{', '.join(fixed)} stay at the clients and are not trained")

    def _fitting(self) -> int:
        """Clients in a product: as many as the cache holds."""
        size: int = 4 * max(columns.stop for _, columns, _ in self._places)
        fitting = min(AT_ONCE_MAX, STACK_BYTES // size)
        if self._training.device == "cpu" and (site := next(iter(self._task.sites), None)) is not None:
            examples = self._loop.examples(site)
            batch = torch.arange(min(examples.count, self._local.batch_size or examples.count))
            with suppress(Exception):  # what is wrong with the model is found and told by trying it (`_probe`)
                fitting = min(fitting, FLOW_BYTES // flow_bytes(build_model(self._task), examples.fetch(batch)[0]))
        return max(1, fitting)

    def _net_of(self, kind: str) -> Net:
        model = build_model(self._task).to(self._training.device).train()
        return Net(kind, model, self._losses, self._local, self._places, self.at_once, self._training.device)

    def _net_that_agrees(self) -> Net:
        reasons = []
        for kind in KINDS:
            try:
                self._net = self._net_of(kind)
                self._probe()
                return self._net
            except CannotBatch as error:
                reasons.append(f"{kind}: {error}")
            except Exception as error:
                reasons.append(f"{kind}: {str(error).strip() or type(error).__name__}")
        raise CannotBatch("; ".join(reasons))

    def _probe(self) -> None:
        """Train the first few clients both ways; where all of them fail both ways, the next few.

        Raises:
            CannotBatch: the results differ, or there is none to compare.
        """
        request = {"local": dict(self._training.overrides), "algorithm": self._training.algorithm}
        self.begin(ModelBench(self._task, request).initial(0))
        sites = cycle(self._task.sites)
        if not any(self._agrees_on(list(islice(sites, min(TRIED, self.at_once)))) for _ in range(TRIES)):
            raise CannotBatch("every client that was tried leaves the finite numbers: there is nothing to compare")

    def _agrees_on(self, sites: Sequence[str]) -> bool:
        """Whether the results of these clients are the same; not, where there is none to compare.

        Raises:
            CannotBatch: they differ.
        """
        every = [self._loop.examples(site) for site in sites]
        chosen = sorted(_of_one_kind(every), key=lambda index: -every[index].count)
        if not chosen:
            raise CannotBatch("the task names no sites with examples in tensors to try it with")
        found = [_telling(every[index], self._local.batch_size, number) for number, index in enumerate(chosen)]
        seeds = [self._telling_seed(examples, number) for number, examples in enumerate(found)]
        jobs = [Job(sites[index], seed) for index, seed in zip(chosen, seeds, strict=True)]
        rows, alone = Rows(self.form, len(jobs)), Rows(self.form, len(jobs))
        results = self._product(range(len(jobs)), jobs, found, rows)
        compared = []
        for index, (job, examples) in enumerate(zip(jobs, found, strict=True)):
            theirs = self._loop.one(job, alone, index, examples)
            kept = self._loop.exchange.own_of(job)[0]
            compared.append(_compare(results[index], theirs, self._resting, kept))
        return any(compared[1:] or compared)  # the first one's batches are full, and so tell less

    def _telling_seed(self, examples: Examples, number: int) -> int:
        """One with which the first example is in the first batch, so that it only fills the second one up."""
        generator = torch.Generator() if self._local.shuffle else None
        for seed in count(number, TRIED):
            seed_everything(seed)
            if 0 in next(orders(examples.count, 1, generator))[: self._width(examples)]:
                break
        return seed


class Batched(OneProcess):
    """The batched engine of one process.

    Args:
        training: of all clients.
        at_once: clients in a product (k); None: as many as the cache holds.
        threads: of each operation.

    Raises:
        CannotBatch: with the reason.
    """

    def __init__(self, training: Training, *, at_once: int | None = None, threads: int | None = 1) -> None:
        with threads_of_torch(threads):
            trainer = BatchTrainer(training, at_once=at_once)
        super().__init__(on_device(f"batched (k={trainer.at_once})", training), trainer, threads)
        self.at_once, self.kind = trainer.at_once, trainer.kind


def _telling(examples: Examples, batch_size: int | None, number: int) -> Examples:
    """A few of a client's examples, by which it shows when they see each other, or those of other clients.

    Two batches of the first client, one and a few examples more of the others: their second ones are filled up. Floats
    are of other sizes for each client, and the largest in its first example, which is what they are filled up with.
    """
    size = batch_size or examples.count
    most = examples.count if examples.count > size else max(1, examples.count - number)
    taken = min(most, size + number if number else 2 * size)
    inputs, *others = _taken(replace(examples, chosen=examples.rows(torch.arange(taken)))).tensors or ()
    if inputs.is_floating_point():
        scales = inputs.new_full((taken, *(1 for _ in inputs.shape[1:])), 0.8 * 0.6**number)
        scales[0] = 0.6**number
        inputs = inputs * scales
    return replace(examples, count=taken, tensors=(inputs, *others), chosen=None)


def _compare(ours: Trained | Failed, theirs: Trained | Failed, resting: Sequence[str], kept: Arrays) -> bool:
    """Whether there is something to compare.

    Args:
        ours: of the product.
        theirs: of the same client alone.
        resting: what no optimizer moves.
        kept: the layers of its own that the client began with.

    Raises:
        CannotBatch: it differs.
    """
    if isinstance(ours, Failed) and isinstance(theirs, Failed):
        return False
    if isinstance(ours, Failed) or isinstance(theirs, Failed):
        way = "in the product" if isinstance(ours, Failed) else "alone"
        raise CannotBatch(f"{ours.client_id} leaves the finite numbers {way} only")
    for name in resting:
        if not np.array_equal(ours.update[name], theirs.update[name]):
            raise CannotBatch(f"{name} changes while a client trains, and no optimizer moves it")
    moved, expected = _moved(ours, kept), _moved(theirs, kept)
    distance, length = np.linalg.norm(moved - expected), np.linalg.norm(expected)
    if not distance <= AGREE * length:
        raise CannotBatch(f"the update of {ours.client_id} is {distance / length:.1e} off, relative to its length")
    return True


def _moved(result: Trained, kept: Arrays) -> Array:
    """All floats of a result: what it sends, and what has changed of what stays."""
    floats = [array for array in result.update.values() if array.dtype == np.float32]
    floats += [array - kept.get(name, 0) for name, array in result.own.items()]
    return np.concatenate([array.ravel() for array in floats], dtype=np.float64)  # whose squares stay finite


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _of_one_kind(found: Sequence[Examples]) -> list[int]:
    """Which clients' examples can lie in one tensor: those like the first that has tensors."""
    kinds = [examples.tensors and [(t.shape[1:], t.dtype) for t in examples.tensors] for examples in found]
    return [index for index, kind in enumerate(kinds) if kind and kind == next(filter(None, kinds))]


def _beside(found: Sequence[Examples]) -> tuple[list[Examples], tuple[torch.Tensor, ...], list[int]]:
    """The clients' examples in one tensor for all, and where in it each client's begin."""
    first = found[0].tensors or ()
    if all(all(a is b for a, b in zip(first, examples.tensors or (), strict=True)) for examples in found):
        return list(found), first, [0] * len(found)
    taken = [e if e.chosen is None else _taken(e) for e in found]
    tensors = tuple(torch.cat(column) for column in zip(*(e.tensors or () for e in taken), strict=True))
    ends = np.cumsum([examples.count for examples in taken]).tolist()
    return taken, tensors, [0, *ends[:-1]]


def _taken(examples: Examples) -> Examples:
    return replace(examples, tensors=tuple(t[examples.chosen] for t in examples.tensors or ()), chosen=None)

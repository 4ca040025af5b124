"""Trial of a task's model, loss and metrics on a batch of its rows, before a training.

A fault found here would end a training at its first step, or leave a metric out of all rounds. The trial builds a
separate model; changes of the loss, the metrics, the data and the random generators are undone: a run is the same with
and without its trial.

A metric may fail on one batch and not on another: an AUC of a single class, a precision without positives. It is broken
if it fails on all: on real batches, on these with targets of several classes, and on these with other outputs.
"""

import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from atoll.ground.printable import count_of
from atoll.task.context import Context, within
from atoll.task.errors import TaskBroken
from atoll.task.metrics import SUMS_MAX, Metric, Tried, contract_fault, different_lengths, tried
from atoll.task.randomness import generators_kept, seeded
from atoll.task.task import Task
from atoll.task.told import logger
from atoll.training.data.batches import to_device
from atoll.training.data.draws import drawing, is_fixed
from atoll.training.data.row_forms import form_of, kind_of
from atoll.training.data.trees import map_tensors, tensors
from atoll.training.data.units import units_of
from atoll.training.model.as_built import AsBuilt
from atoll.training.model.parameters import bare_model, model_on_meta, training_faults
from atoll.training.trials.contract import lone_row_refused, one_loss
from atoll.training.trials.trial import Fault, eager, undone

SMALL = 30_000_000
"""Number of parameters up to which the pass is real; a larger model is built on `meta`, without memory."""

FEW, MANY = 8, 256
"""Number of examples of the batch, and of the second one if the first fails."""

KINDS_MAX = 8
"""Largest number of kinds of rows that are tried."""

SITES_READ = 64
"""Largest number of sites of which a row is read, if the data set does not show the form of its rows."""

WORDS_MAX = 300

_ON_A_COPY = ", which others read: let it work on a copy, as in `x = x - 1` for `x -= 1`"
"""The fault, and the way out, of code that changes its arguments."""

Casting = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A data set of a task from which a trial takes a batch."""

    data: Any
    where: str
    """The data set's name in a sentence, such as "the train data of site 'a'"."""
    context: Context
    is_trained: bool = False
    """Whether the batch is for the built-in training; else for an evaluation."""
    at_once: int | None = None
    """The largest number of examples of a batch; None: any."""

    def indices(self, most: int) -> torch.Tensor:
        """Return the indices of a batch, spread over the data set, because rows may be sorted by label."""
        every = len(self.data)
        count = min(every, most, self.at_once or most)
        return torch.arange(count) * every // count


def sites_by_kind(data: Mapping[str, Any]) -> list[list[str]]:
    """Return the sites with rows of each kind, at most `KINDS_MAX`, from their data sets."""
    reads, found = len(data) <= SITES_READ, dict[str, list[str]]()
    with generators_kept():
        for site, dataset in data.items():
            found.setdefault(kind_of(dataset, reads=reads), []).append(site)
    return [*found.values()][:KINDS_MAX]


def first_of_kinds(kinds: Mapping[str, str], sizes: Mapping[str, int]) -> list[str]:
    """Return a site for each of at most `KINDS_MAX` kinds of rows: the first with enough examples for a batch.

    Args:
        kinds: the kind of each site, in their order.
        sizes: the number of examples of each.
    """
    found: dict[str, str] = {}
    for site, kind in kinds.items():
        chosen = found.setdefault(kind, site)
        if sizes[chosen] < min(FEW, sizes[site]):
            found[kind] = site
    return [*found.values()][:KINDS_MAX]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A batch that the model and the loss accept."""

    rows: Rows
    outputs: Any
    targets: Any
    count: int
    """The number of the batch's examples."""
    is_real: bool
    """Whether the outputs are real; else they are drawn, in the form of the outputs of a model on `meta`."""


class _Refused(Exception):
    """A batch that the model or the loss refuses; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A way to run a task on a batch of each of some data sets."""

    task: Task
    """The task, with its options and settings."""
    every: Sequence[Rows]
    """The data sets; those without examples have no batch."""
    seed: int = 0
    """The seed of the model, and of the numbers that it draws."""
    device: torch.device | str = "cpu"
    casting: Casting = nullcontext
    """Returns a context of the pass, such as autocast."""
    reading: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
    """Of an output, before a metric reads it."""
    unmeasured: Iterable[Rows] = ()
    """Data sets for evaluations that this run may not make: a metric that accepts a batch of one of them is not broken.
    They are read if it accepts no other batch."""


def first_batch(way: Batches) -> Iterator[Fault]:
    """Yield a fault for each way in which a task's model, loss and metrics refuse a batch of each data set.

    The log names a metric that fails only on some batches.

    Raises:
        OSError: rows cannot be read now.
    """
    task, data = way.task, [rows.data for rows in way.every if not is_fixed(rows.data)]
    with undone(loss=task.loss, metrics=dict(task.metrics), units=task.units, data=data), seeded(way.seed):
        yield from _Trial(way).faults([rows for rows in way.every if len(rows.data)])


class _Trial:
    def __init__(self, way: Batches) -> None:
        self._unmeasured, self._of_unmeasured = way.unmeasured, list[_Seen]()
        self._task, self._seed, self._casting, self._reading = way.task, way.seed, way.casting, way.reading
        self._model, self._device = model_on_meta(way.task), torch.device("meta")
        of_module = [*self._model.parameters()] if isinstance(self._model, nn.Module) else []
        self._changing = set[int]()
        """The metrics that change their arguments."""
        self._is_real = sum(parameter.numel() for parameter in of_module if not is_lazy(parameter)) < SMALL
        if self._is_real:
            self._model, self._device = bare_model(way.task, way.seed).to(way.device), torch.device(way.device)

    def faults(self, every: Sequence[Rows]) -> Iterator[Fault]:
        """Yield the faults on a batch of each data set; see `first_batch`."""
        if any(map(is_lazy, self._model.parameters())) or (self._task.fit is None and training_faults(self._model)):
            return  # an untrainable model is refused at its construction, with the names of its layers
        as_built = AsBuilt({"model": self._model})  # `task.model` may return one object again and again
        refused, seen = dict[str, tuple[list[str], BaseException | None]](), list[_Seen]()
        try:
            with eager():
                for rows in sorted(every, key=lambda rows: not rows.is_trained):
                    if refused and not rows.is_trained:
                        break  # an evaluation would fail in the same way
                    try:
                        seen += filter(None, [self._seen(rows)])
                    except _Refused as error:
                        refused.setdefault(str(error), ([], error.__cause__))[0].append(rows.where)
                for why, (wheres, cause) in refused.items():
                    yield Fault(f"{', '.join(wheres)}: {why}", cause)
                if not refused:
                    yield from map(Fault, self._faults_of_metrics(seen))
        finally:
            as_built.restore()
            self._model.zero_grad(set_to_none=True)

    def _seen(self, rows: Rows) -> _Seen | None:
        """Return a batch of a data set with the model's outputs; None: unknown.

        Raises:
            _Refused: no batch is accepted.
        """
        try:
            return self._pass(rows, rows.indices(FEW))
        except _Refused as refused:
            if len(rows.data) <= FEW:
                raise
            for indices in (rows.indices(MANY), *self._first_in_order(rows)):
                with suppress(_Refused):
                    return self._pass(rows, indices)
            raise refused from refused.__cause__

    def _first_in_order(self, rows: Rows) -> Iterator[torch.Tensor]:
        """Yield the first batch if no shuffle draws another: rows may be sorted into batches of one shape."""
        if rows.at_once is not None and not (rows.is_trained and self._task.local.shuffle):
            yield torch.arange(min(rows.at_once, len(rows.data)))

    def _pass(self, rows: Rows, indices: torch.Tensor) -> _Seen | None:
        """Run the task on a batch, and return the batch with its outputs; errors and None as in `_seen`."""
        batch, count = self._batch(rows, indices), len(indices)
        inputs, targets = to_device(batch, self._device)
        step, outputs, read = "model", None, None
        self._model.train(rows.is_trained)
        with within(rows.context), torch.set_grad_enabled(rows.is_trained and self._is_real):
            try:
                with self._casting(), lone_row_refused():
                    before = map_tensors(torch.Tensor.clone, (inputs, targets))
                    outputs = self._model(inputs)
                    if not self._is_real:
                        return _Seen(rows, map_tensors(_drawn, outputs), batch[1], count, is_real=False)
                    if _differ(before[0], inputs):
                        raise TaskBroken(f"the model changes its inputs in place{_ON_A_COPY}")
                    read = map_tensors(self._read, outputs)
                    step = "loss"
                    loss = one_loss(self._task.loss(outputs, targets), is_trained=rows.is_trained)
                    if _differ(before[1], targets):
                        raise TaskBroken(f"the loss changes its targets in place{_ON_A_COPY}")
                    if rows.is_trained:
                        step = "backward pass"
                        loss.backward()  # type: ignore[no-untyped-call]
                step = "units"
                units_of(self._task).sums(loss.item(), targets, count)
            except Exception as error:
                if (refused := self._refused(step, error, inputs, targets, outputs)) is not None:
                    raise refused from error
                return None
        return _Seen(rows, read, targets, count, is_real=True)

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reading(tensor.detach().clone())  # a loss may change its outputs in place

    def _batch(self, rows: Rows, indices: torch.Tensor) -> Any:
        try:
            return drawing(rows.data, self._seed)(0, indices)
        except (OSError, MemoryError):
            raise
        except TaskBroken as error:
            raise _Refused(str(error)) from error
        except Exception as error:
            raise _Refused(f"its rows cannot be read: {_said(error)}") from error

    def _refused(self, step: str, error: Exception, inputs: Any, targets: Any, outputs: Any) -> _Refused | None:
        """Return the refusal of a batch; None if the error says nothing about a training.

        Such an error: memory is short, or a process group does not exist yet.

        Raises:
            OSError: the task's code cannot read a file now.
        """
        is_of_ranks = not dist.is_initialized() and any("distributed" in frame.filename for frame in _frames(error))
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or is_of_ranks:
            return None
        if isinstance(error, OSError):
            raise error
        cast = self._cast_that_helps(step, inputs, targets, map_tensors(torch.Tensor.detach, outputs))
        if not self._is_real and not cast:
            return None
        if isinstance(error, TaskBroken):
            return _Refused(str(error))
        return _Refused(
            f"the {step} does not take a batch of the inputs {form_of(inputs)} and the targets {form_of(targets)}: "
            f"{_said(error)}: {cast or _way_out(step, inputs)}"
        )

    def _cast_that_helps(self, step: str, inputs: Any, targets: Any, outputs: Any) -> str:
        """Return the way out if only a dtype is wrong, else ""."""
        floats = [p.dtype for p in self._model.parameters() if p.is_floating_point()][:1]
        dtypes = {"model": floats, "loss": [*floats, torch.int64], "backward pass": floats}.get(step, [])
        for dtype in dtypes:
            try:
                with torch.no_grad(), self._casting():
                    if step == "model":
                        self._model(map_tensors(partial(_to, dtype), inputs))
                    else:
                        one_loss(self._task.loss(outputs, map_tensors(partial(_to, dtype), targets)))
                        if step == "backward pass" and _are_of(dtype, targets):
                            continue  # their dtype is not what is wrong
            except Exception:
                continue
            of = "inputs" if step == "model" else "targets"
            return f"the {step} takes these {of} as {str(dtype).removeprefix('torch.')}: let task.data return it"
        return ""

    # ------------------------------------------------------------ metrics

    def _faults_of_metrics(self, seen: Sequence[_Seen]) -> Iterator[str]:
        room = SUMS_MAX
        for name, metric in self._task.metrics.items() if seen else ():
            found = [(one, self._tried(metric, one, room)) for one in seen]
            if id(metric) in self._changing:
                yield f"metric {name!r}: it changes its outputs or targets in place{_ON_A_COPY}"
                continue
            lengths = [len(of_one.sums) for _, of_one in found if not of_one.fault]
            room -= max(lengths, default=0)
            if different := different_lengths([*lengths, *self._lengths_of_first_rows(metric, seen, room)]):
                yield f"metric {name!r}: {different}"
                continue
            for one, of_one in [(one, of_one) for one, of_one in found if of_one.fault][:1]:
                said = f"metric {name!r}: of {count_of(one.count, 'row')} of {one.rows.where}, {of_one.fault}"
                # a metric need not accept drawn outputs, or give finite numbers for them
                is_known = one.is_real or (bool(of_one.sums) and contract_fault(metric, of_one.sums, SUMS_MAX) != "")
                if lengths or not is_known or self._works_elsewhere(metric, one, room):
                    logger.warning("%s: it is left out wherever it does so", said)
                else:
                    yield f"{said}: {of_one.way_out}"

    def _lengths_of_first_rows(self, metric: Any, seen: Sequence[_Seen], room: int) -> Iterator[int]:
        """Yield the number of sums of the first examples, perhaps of a single class."""
        for one in seen if isinstance(metric, Metric) else ():
            try:
                first = self._pass(one.rows, torch.arange(min(one.count, FEW // 2)))
            except _Refused:
                continue
            found = None if first is None else self._tried(metric, first, room)
            yield from [len(found.sums)] if found is not None and not found.fault else []

    def _tried(self, metric: Any, one: _Seen, room: int) -> Tried:
        outputs, targets = given = map_tensors(torch.Tensor.clone, (one.outputs, one.targets))
        with torch.no_grad(), within(one.rows.context):
            found = tried(metric, outputs, targets, room)
        if _differ(given, (one.outputs, one.targets)):
            self._changing.add(id(metric))
        return found

    def _works_elsewhere(self, metric: Any, one: _Seen, room: int) -> bool:
        """Return whether a metric that fails on a batch keeps its contract on a larger or on a changed batch."""
        return any(not self._tried(metric, other, room).fault for other in self._others(one))

    def _others(self, one: _Seen) -> Iterator[_Seen]:
        if one.count > 1:
            varied = map_tensors(_varied, one.targets)
            for change in (_same, _turned, _calmed):
                yield replace(one, outputs=map_tensors(change, one.outputs), targets=varied)
        with suppress(_Refused):
            yield from filter(None, [self._pass(one.rows, one.rows.indices(MANY))])
        if one.rows.is_trained:  # a model may return other outputs in evaluation mode
            with suppress(_Refused):
                yield from filter(None, [self._pass(replace(one.rows, is_trained=False), one.rows.indices(FEW))])
            yield from self._seen_unmeasured()

    def _seen_unmeasured(self) -> list[_Seen]:
        """Return a batch of each data set that this run does not evaluate, as far as it can be read."""
        try:
            for rows in self._unmeasured:
                with suppress(_Refused):
                    self._of_unmeasured += filter(None, [self._seen(rows)])
        except Exception as error:  # an error of the task's code, for data that this run does not need
            logger.debug("%s", error)
        self._unmeasured = ()
        return self._of_unmeasured


def _differ(one: Any, other: Any) -> bool:
    """Return whether two trees of the same tensors differ in a value; NaN is equal to itself."""
    ours, theirs = ([each.detach() for each in tensors(tree) if _is_plain(each)] for tree in (one, other))
    return len(ours) == len(theirs) and any(
        not bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(ours, theirs, strict=True)
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be compared by its entries."""
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta"


def _same(outputs: torch.Tensor) -> torch.Tensor:
    return outputs


def _turned(outputs: torch.Tensor) -> torch.Tensor:
    """Return outputs that predict another class in each row, with the same range and sums."""
    if not outputs.is_floating_point() or not outputs.dim():
        return outputs
    if outputs.dim() > 1 and outputs.shape[1] > 1:
        return torch.stack([row.roll(number, 0) for number, row in enumerate(outputs)])
    is_share = bool(((outputs >= 0) & (outputs <= 1)).all())
    odd = _row_numbers(outputs) % 2 == 1
    return torch.where(odd, 1 - outputs if is_share else -outputs, outputs)


def _calmed(outputs: torch.Tensor) -> torch.Tensor:
    """Return outputs scaled into [-1, 1], so that their exponentials are finite."""
    if not outputs.is_floating_point() or not outputs.numel():
        return outputs
    finite = torch.nan_to_num(outputs)
    return finite / finite.abs().max().clamp(min=1)


def _varied(targets: torch.Tensor) -> torch.Tensor:
    """Return targets changed to several classes or values, within the range of the given ones."""
    if not targets.dim() or not targets.numel() or targets.is_complex():
        return targets
    numbers = _row_numbers(targets)
    if targets.dtype == torch.bool:
        return (targets.long() + numbers) % 2 == 1
    if targets.is_floating_point():
        are_classes = bool(((targets == 0) | (targets == 1)).all())
        return (targets + numbers) % 2 if are_classes else targets + numbers
    classes = max(int(targets.max()), 1) + 1
    return torch.where(targets < 0, targets, (targets + numbers) % classes).to(targets.dtype)


def _row_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(tensor), device=tensor.device).reshape(-1, *[1] * (tensor.dim() - 1))


def _drawn(tensor: torch.Tensor) -> torch.Tensor:
    """Return random numbers in the shape of an output that has no memory."""
    drawn = torch.rand(tensor.shape)
    return drawn.to(tensor.dtype)


def _are_of(dtype: torch.dtype, tree: Any) -> bool:
    return all(tensor.dtype == dtype or not tensor.is_floating_point() for tensor in tensors(tree))


def _to(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype)


def _way_out(step: str, inputs: Any) -> str:
    if step == "model" and not any(True for _ in tensors(inputs)):
        return "make tensors of the rows in task.data, or of a batch of them in Task(collate=...)"
    if step in ("model", "loss"):
        return f"let task.data return what task.{step} takes, or Task(collate=...) make it of the rows"
    return {"units": "let Task(units=...) return one number for the targets"}.get(step, "correct the model or the loss")


_LIBRARIES = (*sysconfig.get_paths().values(), str(Path(__file__).parents[2]), "<")
"""Prefixes of file names that are not the task's."""


def _frames(error: Exception) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def _said(error: Exception) -> str:
    """Describe an error of the task's code in words, with the place that raised it."""
    mine = [frame for frame in _frames(error) if not frame.filename.startswith(_LIBRARIES)]
    place = f" ({mine[-1].filename}, line {mine[-1].lineno})" if mine else ""
    while not str(error).strip() and isinstance(cause := error.__cause__ or error.__context__, Exception):
        error = cause  # an exception without words gives way to its cause
    lines = str(error).strip().splitlines() or ["without words"]
    return f"{type(error).__name__}: {lines[0][:WORDS_MAX].replace('; ', ', ')}{place}"

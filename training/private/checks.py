"""Refusal of models and losses whose rows have no gradients of their own, by the layer's name, before the first step.

A row's gradient means something only if the row's loss depends on no other row. What mixes rows often runs without an
error: `h - h.mean(0)` of one row is zero, so that a private training would train on zeros. So outputs, loss and
gradients of a few rows are computed alone and together, once, and compared. Nothing of the trial stays.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from atoll.ground.printable import count_of
from atoll.task.task import Task
from atoll.training.data.batches import to_device
from atoll.training.data.draws import drawing
from atoll.training.data.trees import map_tensors, tensors
from atoll.training.data.units import Units, units_in, units_of
from atoll.training.private.captured_gradients import CapturedGradients, NotCaptured
from atoll.training.private.example_gradients import ExampleGradients, Gradients, NotRows, columns_of
from atoll.training.trials.contract import one_loss
from atoll.training.trials.trial import undone

FEW = 4
"""Rows of the trial."""

TOLERANCE = 1e-4
"""Largest difference between a row alone and in a batch, in the largest value: rounding is a hundredth of it."""

_CONTROL = "vmap: It looks like you're"
"""First words of torch's errors about `.item()` and branches that depend on values."""

Engine = CapturedGradients | ExampleGradients


def model_faults(model: nn.Module) -> Iterator[str]:
    """Yield a sentence for each layer of a model in training mode that mixes rows or keeps what it sees of them."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) and module.training:
            yield (
                f"{name or kind}: {kind} in training mode normalizes each row by the others, so no row has a gradient "
                "of its own: use GroupNorm or LayerNorm, or keep it in eval mode"
            )
        elif isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            yield f"{name or kind}: {kind} keeps means of the rows that it sees: use track_running_stats=False"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            yield f"{name}: a hook changes its gradient, which gradients of single rows do not pass: remove the hook"


def delta_fault(delta: float, num_examples: int) -> str | None:
    """Return the sentence about a delta that allows to publish an example as it is; None: it is smaller."""
    if delta * num_examples < 1.0:
        return None
    every = count_of(num_examples, "training example")
    return (
        f"privacy.delta: got {delta:g} with {every}: one over their number or more would allow to publish one of them "
        f"as it is, allowed is less, such as {0.1 / num_examples:.1g}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is tried: a model in training mode, its loss and units, and a few rows.

    Attributes:
        inputs, targets: a collated batch.
        rows: its number of examples, at least 1.
    """

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    units: Units
    inputs: Any
    targets: Any
    rows: int


def trial_of(task: Task, model: nn.Module, data: Any, seed: int, device: torch.device) -> Trial:
    """Return the trial of a model in training mode on a few rows of its data, at least one."""
    count = min(len(data), FEW)
    inputs, targets = to_device(drawing(data, seed)(0, torch.arange(count) * len(data) // count), device)
    return Trial(model=model, loss=task.loss, units=units_of(task), inputs=inputs, targets=targets, rows=count)


def choose(
    trial: Trial, clip_norm: float, *, ways: Sequence[type[Engine]] = (ExampleGradients, CapturedGradients)
) -> tuple[Engine | None, list[str]]:
    """Return the way to a model's example gradients that equals single rows, and the faults; one of both is empty.

    Args:
        trial: the task's model, loss and rows.
        clip_norm: C, for the result.
        ways: the ways that are tried, the one to prefer last.
    """
    if faults := [*model_faults(trial.model)]:
        return None, faults
    try:
        columns_of((trial.inputs, trial.targets), trial.rows)
    except NotRows as error:
        way_out = "let Task(collate=...) give every tensor one row for each example"
        return None, [f"{error}, so its examples cannot be told apart: {way_out}"]
    with undone(model=trial.model, loss=trial.loss):
        if faults := [*_buffer_faults(trial)]:
            return None, faults
        is_random = _is_random(trial)
        if is_random:
            trial.model.eval()
        faults = [*_output_faults(trial)] or [*_loss_faults(trial)]
        kind, found = (None, "") if faults else _way(trial, ways)
    if faults or kind is None:
        return None, faults or [found]
    return kind(trial.model, trial.loss, clip_norm), []


# ---------------------------------------------------------------- buffers and outputs


def _buffer_faults(trial: Trial) -> Iterator[str]:
    before = {name: buffer.clone() for name, buffer in trial.model.named_buffers()}
    with torch.no_grad():
        trial.model(trial.inputs)
    for name, buffer in trial.model.named_buffers():
        if name not in before or buffer.shape != before[name].shape or not torch.equal(buffer, before[name]):
            yield (
                f"{name}: a forward pass changes this buffer, which then tells of the rows without noise: compute it "
                "before the training, or leave it out"
            )


def _is_random(trial: Trial) -> bool:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            found.append([*tensors(trial.model(trial.inputs))])
    return not all(_are_close(one, other) for one, other in zip(*found, strict=True))


@dataclass(frozen=True, slots=True)
class _Record:
    """A call of a module."""

    name: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


@contextmanager
def _recording(model: nn.Module) -> Iterator[list[_Record]]:
    """Record the calls of all modules, in the order in which they end."""
    records: list[_Record] = []

    def record(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Any, outputs: Any) -> None:
            copies = [[t.detach().clone() for t in tensors(each)] for each in (inputs, outputs)]
            records.append(_Record(name, *copies))

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in model.named_modules()]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _output_faults(trial: Trial) -> Iterator[str]:
    """Compare each row's outputs alone with its outputs in the batch, layer by layer."""
    with torch.no_grad(), _recording(trial.model) as together:
        outputs = trial.model(trial.inputs)
    try:
        columns_of(outputs, trial.rows)
    except NotRows:
        yield (
            f"{type(trial.model).__name__}: of {count_of(trial.rows, 'row')} it returns a tensor that has no row for "
            "each, so its outputs cannot be told apart"
        )
        return
    for row in range(min(trial.rows, FEW)):
        try:
            with torch.no_grad(), _recording(trial.model) as alone:
                found = trial.model(_row(trial.inputs, row))
        except Exception as error:  # any: the task's code
            yield f"{type(trial.model).__name__}: it cannot take a row alone: {_first_line(error)}"
            return
        if all(_are_close(_row(a, row), b) for a, b in zip(tensors(outputs), tensors(found), strict=True)):
            continue
        where = _first_difference(together, alone, row) or type(trial.model).__name__
        yield (
            f"{where}: the outputs of a row alone differ from its outputs in a batch, so rows look at each other and "
            "none has a gradient of its own (of one row h - h.mean(0) is 0): let each row depend on itself alone"
        )
        return


def _first_difference(together: list[_Record], alone: list[_Record], row: int) -> str:
    """Return the name of the first module whose outputs differ; of its parent, if its inputs differ already."""
    for one, other in zip(together, alone, strict=False):
        if one.name != other.name or not _have_same_row(one.outputs, other.outputs, row):
            starts = _have_same_row(one.inputs, other.inputs, row)
            return one.name if starts else one.name.rpartition(".")[0]
    return ""


def _have_same_row(whole: Sequence[torch.Tensor], single: Sequence[torch.Tensor], row: int) -> bool:
    """Return whether tensors of a batch have the values of a row alone; those without a row for each do not count."""
    return all(
        _are_close(_row(a, row), b)
        for a, b in zip(whole, single, strict=False)
        if a.dim() and len(a) > row and len(b) == 1
    )


# ---------------------------------------------------------------- the loss


def _loss_faults(trial: Trial) -> Iterator[str]:
    """Compare the loss of the batch with the mean of its rows' losses, by their units."""
    with torch.no_grad():
        outputs = trial.model(trial.inputs)
        try:
            losses = [
                float(one_loss(trial.loss(_row(outputs, row), _row(trial.targets, row)))) for row in range(trial.rows)
            ]
        except Exception as error:  # any: the task's code
            yield f"the loss cannot be called on a row alone, whose gradient is to be clipped: {_first_line(error)}"
            return
        whole = float(one_loss(trial.loss(outputs, trial.targets)))
    units = [units_in(trial.units, _row(trial.targets, row), 1) for row in range(trial.rows)]
    total = sum(loss * count for loss, count in zip(losses, units, strict=True) if count)
    mean = total if trial.units.is_sum else total / sum(units) if sum(units) else whole
    if abs(mean - whole) > TOLERANCE * max(abs(whole), *map(abs, losses), 1e-3):
        yield (
            f"the loss of {count_of(trial.rows, 'row')} is {whole:.6g}, and the mean of their losses, each alone, "
            f"{mean:.6g} (weighted by {trial.units}): either it compares rows with each other, and no row has a loss "
            "of its own, or it divides by something else: say by what with Task(units=...)"
        )


# ---------------------------------------------------------------- gradients


def _way(trial: Trial, ways: Sequence[type[Engine]]) -> tuple[type[Engine] | None, str]:
    """Return the class whose clipped sum equals single rows; else None and a sentence."""
    every, norms = _alone(trial)
    positive = sorted(float(norm) for norm in norms if norm > 0)
    if not positive:
        return None, "no row of the trial has a gradient: the loss does not depend on the trained parameters"
    bound = positive[len(positive) // 2]
    wanted = {
        name: sum(g[name].double() * min(1.0, bound / max(float(n), 1e-300)) for g, n in zip(every, norms, strict=True))
        for name in every[0]
    }
    fault, right = "", list[type[Engine]]()
    for kind in ways:
        try:
            with _position(trial.model) as position:
                found = kind(trial.model, trial.loss, bound).clipped_sum(trial.inputs, trial.targets, trial.rows)
        except (NotCaptured, RuntimeError, ValueError, TypeError) as error:
            said = f"{position() or type(trial.model).__name__}: {_first_line(error)}"
            if _CONTROL in str(error):
                return None, (
                    f"{position() or 'the loss'}: it reads values of tensors (.item(), if, float), which may be other "
                    "rows': compute with tensors (torch.where)"
                )
            fault = fault or f"{said}: the gradients of single rows cannot be computed"
            continue
        if all(_are_close(found[name], torch.as_tensor(wanted[name]), bound) for name in found):
            right.append(kind)
        else:
            name = next(n for n in found if not _are_close(found[n], torch.as_tensor(wanted[n]), bound))
            fault = fault or f"{name}: the gradients of rows, computed together, differ from those of rows alone"
    return (right[-1], "") if right else (None, fault)  # one pass is the faster one


def _alone(trial: Trial) -> tuple[list[Gradients], list[torch.Tensor]]:
    """Return the gradient of each row alone, and its norm."""
    parameters = {name: p for name, p in trial.model.named_parameters() if p.requires_grad}
    every, norms = [], []
    for row in range(trial.rows):
        loss = one_loss(trial.loss(trial.model(_row(trial.inputs, row)), _row(trial.targets, row)), is_trained=True)
        found = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
        gradients = {
            name: torch.zeros_like(p) if g is None else g.nan_to_num(0.0, 0.0, 0.0)
            for (name, p), g in zip(parameters.items(), found, strict=True)
        }
        every.append(gradients)
        norms.append(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
    return every, norms


@contextmanager
def _position(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Provide the name of the module whose forward pass has begun last and not ended."""
    stack: list[str] = []

    def begin(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    def end(*_: object) -> None:
        stack.pop()

    handles = []
    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(begin(name)), module.register_forward_hook(end)]
    try:
        yield lambda: stack[-1] if stack else ""
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------- rows


def _row(tree: Any, row: int) -> Any:
    return map_tensors(lambda tensor: tensor[row : row + 1], tree)


def _are_close(one: torch.Tensor, other: torch.Tensor, scale: float = 0.0) -> bool:
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return bool(torch.equal(one, other))
    one, other = one.double(), other.double()
    if not one.numel():
        return True
    both = one.isfinite() & other.isfinite()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    largest = max(scale, float(torch.where(both, other.abs(), 0.0).max()), 1e-6)
    return float(torch.where(both, (one - other).abs(), 0.0).max()) <= TOLERANCE * largest


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]

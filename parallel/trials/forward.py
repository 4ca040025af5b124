"""The trial of a forward pass before a training: what a mesh would do differently from one process."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from atoll.parallel.data.batch import map_tensors, tensors
from atoll.parallel.engine.blueprint import blocks, blueprint_of, cut, pieces, stage
from atoll.parallel.engine.borrowed import Uses, borrowed_blocks
from atoll.parallel.engine.inplace import Written, storage_of, written_in_forward
from atoll.parallel.engine.passes import REENTRANT
from atoll.parallel.engine.plan import Plan
from atoll.parallel.huggingface.pipeline_stages import INPUTS, first_output
from atoll.parallel.trials.between_passes import follows_examples, moves_by_pass
from atoll.parallel.trials.references import reference_faults
from atoll.task.randomness import seeded
from atoll.task.task import Task
from atoll.training.data.batches import fetcher
from atoll.training.model.as_built import AsBuilt
from atoll.training.model.compiled import in_place
from atoll.training.model.parameters import built_on_meta, model_on_meta

SMALL = 10_000_000
"""Number of parameters up to which a model is built once more for a check."""


class JobRefused(ValueError):
    """The job cannot begin; the message has every reason, separated by semicolons."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The side effects of a forward pass."""

    written: Written = field(default_factory=Written)
    """The tensors that it changes in place."""
    borrowed: list[str] = field(default_factory=list)
    """The blocks with a parameter that is used outside of their calls, in training or evaluation."""
    is_reentrant: bool = False
    """The pass has checkpoints of torch's with `use_reentrant=True`."""
    moved: list[str] = field(default_factory=list)
    """The buffers that it changes in place, without the running statistics of norms."""


def needs_look(plan: Plan) -> bool:
    """Return whether a plan may lose, repeat or not take what a forward pass does."""
    return plan.is_sharded or plan.mesh.dp > 1 or plan.mesh.pp > 1 or plan.microbatches > 1


def check_forward(task: Task, plan: Plan, seed: int, data: Any) -> Forward:
    """Look at a forward pass of a model that is thrown away.

    No pass may change a parameter where the change would be lost, or read one where a plan has another in its place. A
    small model takes a real pass, a large one on `meta`, without memory, if its code runs there. A pass that fails here
    is left to the first step, which reports its error.

    Args:
        task: of the model.
        plan: of the training.
        seed: of the training.
        data: the training data, of which two examples are read.

    Raises:
        JobRefused: with the names of the parameters, or of what follows a rank's examples.
    """
    if not needs_look(plan):
        return Forward()
    with built_on_meta(task) as model:
        return _checked(model, task, plan, seed, data)


def _checked(model: nn.Module, task: Task, plan: Plan, seed: int, data: Any) -> Forward:
    before = AsBuilt({"loss": task.loss})
    with seeded(seed), ExitStack() as at_end:
        at_end.callback(before.restore)
        if sum(parameter.numel() for parameter in model.parameters()) < SMALL:
            model = in_place(task.model())
        try:
            inputs, targets = _rows_on(model, data)
        except Exception:  # any: of the task's data
            return Forward()
        found = _look(model, inputs, targets, task.loss)
        if faults := reference_faults(model, plan, inputs, targets, task.loss):
            raise JobRefused("; ".join(faults))
    if plan.mesh.pp > 1:
        _check_chain(task, plan, seed, data, model)
    is_small = sum(parameter.numel() for parameter in model.parameters()) < SMALL
    if is_small and (fault := follows_examples(task, plan, seed, data)):
        raise JobRefused(fault)
    if found.is_reentrant and plan.is_ddp:
        raise JobRefused(REENTRANT)
    if found.written.parameters and (plan.is_sharded or plan.mesh.pp > 1):
        where = f"{plan.mesh}" + (f" with zero={plan.zero_stage}" if plan.is_sharded else "")
        raise JobRefused(
            f"{', '.join(found.written.parameters)}: forward changes them in place, which {where} would lose or "
            "repeat; use a parametrization (torch.nn.utils.parametrize), or train on one process or with dp_replicate"
        )
    return found


def moved_by_passes(task: Task, plan: Plan, seed: int, data: Any, found: Forward) -> str:
    """Return the sentence about state that a step changes once in each of its passes, or "".

    One process changes it once. Empty: there is no such state, or it is unknown of a large model. Norms have
    `plan.batchnorm`.

    Args:
        task: of the model.
        plan: of the training.
        seed: of the training.
        data: the training data, of which a few examples are read.
        found: in a forward pass.
    """
    names = found.moved
    if plan.microbatches == 1:
        return ""
    if not names and sum(parameter.numel() for parameter in model_on_meta(task).parameters()) < SMALL:
        names = moves_by_pass(task, seed, data)
    if not names:
        return ""
    number = plan.microbatches
    return (
        f"{', '.join(names[:4])}: each forward pass changes them, and a step has {number} passes, one for each "
        f"micro-batch: they change {number} times a step, in one pass over the batch once (plan.accumulate=1"
        f"{', plan.num_microbatches=1' if plan.mesh.pp > 1 else ''} has one)"
    )


def _check_chain(task: Task, plan: Plan, seed: int, data: Any, model: nn.Module) -> None:
    """Check that the stages of a pipeline one after another compute what the model computes.

    A small model is built and compared. Of a large one on `meta` the check follows the tensors from piece to piece, if
    its code runs there; a model of Hugging Face has a separate check (`pipeline_trial.chain_faults`).

    Raises:
        JobRefused: `forward` does more than to call its chain.
    """
    if sum(parameter.numel() for parameter in model.parameters()) >= SMALL:
        if not blueprint_of(model).is_planned and (at := _leaves_chain(model, data)):
            raise JobRefused(_more_than_chain(plan, f"{at} does not take what the piece before it returned"))
        return
    with torch.no_grad():
        model, other = (_built(task, seed) for _ in range(2))  # a pass may move what the next one finds
        values = {name: value.clone() for name, value in model.state_dict().items()}
        other.load_state_dict(values, assign=True)  # nothing can be copied into a buffer whose elements share memory
        assigned = dict(other.named_parameters(remove_duplicate=False))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            vars(assigned[name]).update(vars(parameter))  # a forward pass may read attributes of parameters
        stages = [stage(other, names) for names in cut(other, plan.num_stages)]
    for is_training in (False, True):
        for part in (model, *stages):
            part.train(is_training)
        _compare(model, stages, plan, seed, data)


def _built(task: Task, seed: int) -> nn.Module:
    with seeded(seed):
        return in_place(task.model())


def _compare(model: nn.Module, stages: list[nn.Module], plan: Plan, seed: int, data: Any) -> None:
    """Check that stages compute, and draw, what their model does in its present mode."""
    with torch.no_grad():
        try:
            inputs = fetcher(data)(torch.arange(min(2, len(data))))[0]
            options = {INPUTS: inputs} if blueprint_of(model).is_planned else {}
            with seeded(seed):
                outputs = first_output(model(inputs)) if options else model(inputs)
        except Exception:
            return
        try:
            hidden = inputs
            with seeded(seed):
                for part in stages:
                    hidden = part(hidden, **options)
            torch.testing.assert_close(hidden, outputs, rtol=1e-4, atol=1e-5, equal_nan=True)
        except Exception as error:
            mode = "training" if model.training else "evaluation"
            why = f"the stages one after another give other outputs than the model in {mode}"
            raise JobRefused(_more_than_chain(plan, why)) from error


def _more_than_chain(plan: Plan, why: str) -> str:
    return (
        f"pp={plan.mesh.pp}: {why}, so forward does more than to call its chain (a skip connection over it, a hook): "
        "use pp=1, or put it into a layer"
    )


def _leaves_chain(model: nn.Module, data: Any) -> str:
    """Return the first piece of a model's chain whose input is not the result of the piece before, or "".

    "the loss": the model returns something else than its last piece. Empty: the chain is sound, or a pass fails.
    """
    found: list[str] = []
    gave: list[tuple[Any, int]] = []

    def give(outputs: Any) -> None:
        gave.append((outputs, outputs._version if isinstance(outputs, torch.Tensor) else 0))

    def before(name: str, _module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if len(args) != 1 or options or not _is_handed(*gave[-1], args[0]):
            found.append(name)

    hooks = []
    for name in pieces(model):
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        hooks.append(module.register_forward_hook(lambda _module, _args, outputs: give(outputs)))
    model.train()
    try:
        with torch.no_grad():
            inputs, _ = _rows_on(model, data)
            give(inputs)
            outputs = model(inputs)
    except Exception:
        return ""
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "" if _is_handed(*gave[-1], outputs) else "the loss"


def _is_handed(given: Any, version: int, taken: Any) -> bool:
    """Return whether a piece takes what was given: the tensor itself, or a view of all of it, not written to since."""
    if not isinstance(given, torch.Tensor) or not isinstance(taken, torch.Tensor):
        return given is taken
    is_same = given is taken or (given.shape == taken.shape and storage_of(given) == storage_of(taken))
    return is_same and given._version == version


def _rows_on(model: nn.Module, data: Any) -> Any:
    """Return inputs and targets of two examples, on the device of a model."""
    device = next(model.parameters()).device
    return map_tensors(lambda tensor: tensor.to(device), fetcher(data)(torch.arange(min(2, len(data)))))


def _look(model: nn.Module, inputs: Any, targets: Any, loss: Callable[[Any, Any], torch.Tensor]) -> Forward:
    """Return what passes in training and evaluation, and the loss, do; nothing if the one in training fails."""
    borrowed: list[str] = []
    found: list[Any] = []

    def run() -> Any:
        outputs = model(inputs)
        found.append(outputs)
        used = Uses({storage_of(parameter): name for name, parameter in model.named_parameters()}, lambda _name: False)
        with suppress(Exception), used:  # any: the task's code, here perhaps with tensors that have no values
            loss(outputs, targets)
        return outputs, [model.get_parameter(name) for name in used.borrowed]

    def watched() -> None:
        borrowed.extend(borrowed_blocks(model, blocks(model), run))

    try:
        model.train()
        written = written_in_forward(model, watched)
    except Exception:
        return Forward()
    is_reentrant = any(_has_reentrant(tensor.grad_fn) for tensor in tensors(found))
    try:
        model.eval()
        with torch.no_grad():
            watched()
    except Exception:  # the first evaluation reports it
        pass
    norms = [f"{name}." for name, module in model.named_modules() if isinstance(module, _NormBase)]
    moved = [name for name in written.buffers if not name.startswith(tuple(norms))]
    return Forward(written, list(dict.fromkeys(borrowed)), is_reentrant, moved)


def _has_reentrant(node: Any) -> bool:
    """Return whether a graph of gradients has a checkpoint that runs another backward pass."""
    waiting, seen = [node], {None}
    while waiting:
        if (node := waiting.pop()) in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False

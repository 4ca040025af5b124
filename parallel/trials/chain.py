"""Trial of a pipeline: its stages, one after another, compute what the model computes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from atoll.parallel.engine.blueprint import blueprint_of, cut, pieces, stage
from atoll.parallel.huggingface.pipeline_stages import INPUTS, first_output
from atoll.parallel.trials.watched import storage_of
from atoll.parallel.trials.way import MeshWay
from atoll.task.randomness import seeded
from atoll.training.trials.trial import Fault


def chain(way: MeshWay) -> Iterator[str]:
    """Yield a sentence if `forward` does more than to call the chain of which a pipeline makes stages.

    A small model is built and compared. Of a large one on `meta` the trial follows the tensors from piece to piece, if
    its code runs there; a model of Hugging Face has a separate trial (`pipeline_trial.chain_faults`).
    """
    if way.plan.mesh.pp == 1:
        return
    if way.is_small:
        yield from _differing(way)
    elif not blueprint_of(way.model).is_planned and (at := _leaves_chain(way)):
        yield _more_than_chain(way, f"{at} does not take what the piece before it returned")


def _more_than_chain(way: MeshWay, why: str) -> str:
    return (
        f"pp={way.plan.mesh.pp}: {why}, so forward does more than to call its chain (a skip connection over it, "
        "a hook): use pp=1, or put it into a layer"
    )


def _differing(way: MeshWay) -> Iterator[Fault]:
    """Yield a fault if stages compute, or draw, otherwise than their model, in training or in evaluation."""
    with torch.no_grad():
        model, other = way.new_model(), way.new_model()  # a pass may move what the next one finds
        values = {name: value.clone() for name, value in model.state_dict().items()}
        other.load_state_dict(values, assign=True)  # nothing can be copied into a buffer whose elements share memory
        assigned = dict(other.named_parameters(remove_duplicate=False))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            vars(assigned[name]).update(vars(parameter))  # a forward pass may read attributes of parameters
        stages = [stage(other, names) for names in cut(other, way.plan.num_stages)]
        for is_training in (False, True):
            for part in (model, *stages):
                part.train(is_training)
            if (error := _difference(model, stages, way)) is not None:
                mode = "training" if is_training else "evaluation"
                why = f"the stages one after another give other outputs than the model in {mode}"
                yield Fault(_more_than_chain(way, why), error)
                return


def _difference(model: nn.Module, stages: list[nn.Module], way: MeshWay) -> Exception | None:
    """Return the error of the stages, or of the comparison of their outputs; None: they agree, or the model fails."""
    try:
        inputs = way.rows(torch.arange(min(2, len(way.data))))[0]
        options = {INPUTS: inputs} if blueprint_of(model).is_planned else {}
        with seeded(way.seed):
            outputs = first_output(model(inputs)) if options else model(inputs)
    except Exception:
        return None
    try:
        hidden = inputs
        with seeded(way.seed):
            for part in stages:
                hidden = part(hidden, **options)
        torch.testing.assert_close(hidden, outputs, rtol=1e-4, atol=1e-5, equal_nan=True)
    except Exception as error:
        return error
    return None


def _leaves_chain(way: MeshWay) -> str:
    """Return the first piece of a model's chain whose input is not the result of the piece before, or "".

    "the loss": the model returns something else than its last piece. Empty: the chain is sound, or a pass fails.
    """
    model, (inputs, _) = way.model, way.two
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

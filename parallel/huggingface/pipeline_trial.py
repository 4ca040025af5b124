"""The trial of a Hugging Face model's chain: a call finds what its `forward` computes between the modules.

Recorders stand in place of the modules, once for the whole model and once as each stage calls it; what the modules and
the loss would see is compared. That takes milliseconds, and no weight is read.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from atoll.parallel.huggingface.pipeline_plan import Calls, layers_of
from atoll.parallel.huggingface.pipeline_stages import StandIn, first_output, without_values
from atoll.parallel.huggingface.tensor_plan import hugging_face_models

WAY_OUT = "use pp=1 (dp_shard divides this model)"

ROWS, WORDS = 4, 5
"""The shape of the trial's tokens."""

LONGEST = 3
"""The longest tuple that is tried as the output of a layer."""


def calls(model: nn.Module, pieces: Sequence[str]) -> Calls:
    """Return the order and form of a model's calls of its planned chain's pieces, found by a trial.

    Args:
        model: a model with a planned chain.
        pieces: the names of its chain, opened.

    Raises:
        ValueError: it cannot be followed, or does not call each of them once.
    """
    kind, whole = type(model).__name__, _whole(model, pieces)
    if uncalled := [name for name in pieces if name not in whole.names]:
        raise ValueError(f"{kind} does not call {', '.join(uncalled)}; {WAY_OUT}")
    if twice := sorted({name for name in whole.names if whole.names.count(name) > 1}):
        raise ValueError(f"{kind} calls {', '.join(twice)} more than once; {WAY_OUT}")
    layers = f"{layers_of(model)}."
    first = list(takewhile(lambda name: not name.startswith(layers), whole.names))
    return Calls(whole.names, len(first), whole.length)


def outputs_of(model: nn.Module, pieces: Sequence[str]) -> Callable[[Any], Any]:
    """Return the function that makes the outputs of the whole model from the tensor of the last stage.

    Args:
        model: a model with a planned chain and without `chain_faults`.
        pieces: the names of its chain, opened.
    """
    outputs = _whole(model, pieces).outputs
    if not isinstance(outputs, Mapping):
        return lambda tensor: tensor
    kind, key = type(outputs), next(iter(outputs))
    return lambda tensor: kind(**{key: tensor})


def chain_faults(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[str]:
    """Return the reason, if any, why the stages of a planned chain compute other numbers than the model.

    Args:
        model: a model with a planned chain.
        stages: the names of the pieces of each stage, in the order of their calls.
    """
    kind, pieces = type(model).__name__, [name for names in stages for name in names]
    whole = _whole(model, pieces)
    if other := _other_outputs(whole.outputs):
        return [f"{kind} returns {other}, which no single stage has; {WAY_OUT}"]
    for start in (pieces.index(names[0]) for names in stages[1:]):
        if (last := pieces[start - 1]) in whole.changed:
            return [f"{kind} changes in place what {last} returns, with which a stage ends; {WAY_OUT}"]
        trial = _called(model, pieces, whole.length, before=pieces[:start])
        if found := trial.failure or _difference(whole, trial, start):
            return [trial.failure or f"{kind} {found}, which later stages do not have; {WAY_OUT}"]
    return []


@dataclass(slots=True)
class _Trial:
    """A call of a model's `forward` in which recorders stand for the modules of the chain."""

    length: int
    """The length of the tuples that layers give; 0: tensors."""
    names: list[str] = field(default_factory=list)
    """The modules that were called, in this order."""
    took: list[Any] = field(default_factory=list)
    """The first argument of each."""
    beside: list[list[Any]] = field(default_factory=list)
    """The other arguments of each, as leaves."""
    changed: list[str] = field(default_factory=list)
    """The modules whose outputs were changed in place."""
    outputs: Any = None
    """The result of the call."""
    failure: str = ""
    """The reason why there is no result."""


class _Recorder(StandIn):
    """A module of the chain in a trial, which gives the same numbers in each."""

    def __init__(self, original: nn.Module, name: str, trial: _Trial, gives: Any) -> None:
        super().__init__(original, lambda _first: gives)
        self.__dict__.update(_name=name, _trial=trial)

    def __getattr__(self, name: str) -> Any:
        return getattr(without_values(self.__dict__["_original"]), name)

    def forward(self, *others: Any, **named: Any) -> Any:
        first, *beside = [*others, *named.values()]
        self._trial.names.append(self._name)
        self._trial.took.append(first.clone() if isinstance(first, torch.Tensor) else first)
        self._trial.beside.append([leaf for leaf in pytree.tree_leaves(beside) if _is_comparable(leaf)])
        return super().forward(first)


def _is_comparable(value: Any) -> bool:
    """Return whether a value can be compared; a cache of keys cannot, and is new in each call."""
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


def _whole(model: nn.Module, pieces: Sequence[str]) -> _Trial:
    """Call the whole model with recorders in place of its chain's modules, and return the record.

    A model that fails, or continues with a row of what a layer gave, may expect a tuple from it.

    Raises:
        ValueError: it cannot be called so.
    """
    kind, row = type(model).__name__, (WORDS, _hidden_size(model))
    if more := _configured_outputs(model):
        raise ValueError(f"{kind} returns {more}, which no single stage has; {WAY_OUT}")
    trials = [_called(model, pieces, 0)]
    while trials[-1].failure or any(getattr(taken, "shape", None) == row for taken in trials[-1].took):
        if len(trials) > LONGEST:
            raise ValueError(trials[0].failure or f"{kind} takes rows of what its layers give; {WAY_OUT}")
        trials.append(_called(model, pieces, len(trials)))
    return trials[-1]


def _called(model: nn.Module, pieces: Sequence[str], length: int, *, before: Sequence[str] = ()) -> _Trial:
    """Call a model or stage with recorders in place of its chain's modules, and return the record.

    Args:
        model: a model of any size, also on meta: no weight of it is used.
        pieces: the names of its chain, opened.
        length: the length of the tuples that layers give; 0: tensors.
        before: the pieces before a stage; empty: the model is whole.
    """
    trial, generator, layers = _Trial(length), torch.Generator().manual_seed(0), f"{layers_of(model)}."
    modules = {name: model.get_submodule(name) for name in pieces}
    skeleton = copy.deepcopy(model, {id(module): nn.Identity() for module in modules.values()})
    hidden_size = _hidden_size(model)
    widths = {name: getattr(module, "out_features", hidden_size) for name, module in modules.items()}
    drawn = torch.randn(ROWS, WORDS, max(widths.values()), generator=generator)
    blank, gave = torch.zeros_like(drawn), {}
    for index, (name, module) in enumerate(modules.items()):
        numbers, zeros = drawn[..., : widths[name]], blank[..., : widths[name]]
        is_blank = name in before[:-1]
        first, *others = (zeros if is_blank else numbers + index + 0.1 * place for place in range(max(length, 1)))
        others = [zeros for _ in others] if name in before else others
        gave[name] = first
        given = (first, *others) if length and name.startswith(layers) else first
        skeleton.set_submodule(name, _Recorder(module, name, trial, given))
    for module in skeleton.modules():
        for name, table in module._buffers.items():
            if table is not None and (table.is_meta or table.is_floating_point()):
                module._buffers[name] = torch.rand(table.shape, generator=generator).to(table.dtype)
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)  # dropout beside the chain, too, is the same in each trial
        try:
            trial.outputs = skeleton.train()(_inputs(model))
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            trial.failure = f"{type(model).__name__} cannot be followed without its modules ({reason}); {WAY_OUT}"
    trial.changed = [name for name, tensor in gave.items() if tensor._version]
    return trial


def _hidden_size(model: nn.Module) -> int:
    """Return the number of features in a layer's output.

    Raises:
        ValueError: the model's configuration names no hidden size.
    """
    ((_, inner),) = hugging_face_models(model)
    size = getattr(inner.config.get_text_config(), "hidden_size", None)
    if not isinstance(size, int):
        raise ValueError(f"the configuration of {type(inner).__name__} has no hidden_size; {WAY_OUT}")
    return size


def _inputs(model: nn.Module) -> torch.Tensor:
    """Return the inputs of a trial: images, or words with the padding word, which mostly is 0."""
    ((_, inner),) = hugging_face_models(model)
    if inner.main_input_name == "pixel_values":
        size = inner.config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return torch.rand(ROWS, inner.config.num_channels, height, width)
    return torch.arange(ROWS * WORDS).reshape(ROWS, WORDS) % 3


def _difference(whole: _Trial, stage: _Trial, start: int) -> str:
    """Return the first difference of a stage's inputs, or of its outputs, from the whole model's; "": none."""
    for index in range(start, len(whole.names)):
        before, name = whole.names[index - 1 : index + 1]
        if not _equal(whole.took[index], stage.took[index]):
            return f"computes what {name} takes from more than the output of {before}"
        if not _all_equal(whole.beside[index], stage.beside[index]):
            return f"hands {name} more than the output of {before}"
    if not _equal(first_output(whole.outputs), first_output(stage.outputs)):
        return f"computes its outputs from more than that of {whole.names[-1]}"
    return ""


def _all_equal(ones: Sequence[Any], twos: Sequence[Any]) -> bool:
    return len(ones) == len(twos) and all(map(_equal, ones, twos))


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        is_known = not one.is_meta and not two.is_meta  # else the forward used a weight of a stand-in
        return is_known and one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two)
    return type(one) is type(two) and bool(one == two)


def _configured_outputs(model: nn.Module) -> str:
    """Describe what a model's configuration adds to its outputs for each layer, in words."""
    ((_, inner),) = hugging_face_models(model)
    flags = ("output_hidden_states", "output_attentions", "output_router_logits")
    return ", ".join(flag.removeprefix("output_") for flag in flags if getattr(inner.config, flag, False))


def _other_outputs(outputs: Any) -> str:
    """Describe what a model returns beside a first tensor, in words. A cache of keys is allowed: no loss takes it."""
    if isinstance(outputs, torch.Tensor):
        return ""
    if not isinstance(outputs, Mapping) or not isinstance(first_output(outputs), torch.Tensor):
        return f"a {type(outputs).__name__}"
    later = list(outputs.items())[1:]
    return ", ".join(name for name, value in later if isinstance(value, torch.Tensor | tuple | list))

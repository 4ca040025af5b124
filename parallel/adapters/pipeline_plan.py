"""The pipeline of a Hugging Face model: transformers' plan of the modules that its `forward` calls one after another.

    {"model.embed_tokens": ..., "model.layers": ..., "model.norm": ..., "lm_head": ...}

Each stage runs the whole `forward`, with stand-ins for the modules of other stages. The stand-in for the last module
before the stage gives what the stage received; the stage hands on what its own last module gave. So what a model
computes between two modules (Granite scales the words, Gemma 2 caps the logits) is computed once, by the later stage.

It must follow from the received values alone, and no table of models tells where it does: `chain_faults` calls
`forward` with recorders in place of the modules, once whole and once as each stage calls it, and compares what the
modules and the loss would see. That takes milliseconds, and no weight is read.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from atoll.parallel.adapters.tensor_plan import hugging_face_models

WAY_OUT = "use pp=1 (dp_shard divides this model)"

ROWS, WORDS = 2, 5
"""The shape of the trial's tokens."""


def planned_chain(model: nn.Module) -> tuple[str, ...]:
    """Return the chain of a Hugging Face model, or of one that has it inside; empty if it leaves out state.

    The modules of transformers' plan come first, then heads that the plan does not name, such as a classifier's. A
    ModuleList stands for its items. Each stage keeps the tables beside the chain, such as those of rotary embeddings.
    """
    found = list(hugging_face_models(model))
    plan = getattr(found[0][1], "_pp_plan", None) if len(found) == 1 else None
    if not plan:
        return ()
    ((prefix, inner),) = found
    core = f"{inner.base_model_prefix}."
    ordered = [*sorted(plan, key=lambda name: not name.startswith(core)), *_heads(inner, core, plan)]
    modules = dict(inner.named_modules())
    names = tuple(f"{prefix}.{name}".lstrip(".") for name in ordered if name in modules)
    inside = tuple(f"{name}." for name in names)
    return names if all(tensor.startswith(inside) for tensor in state_names(model)) else ()


def _heads(inner: nn.Module, core: str, plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the children of a Hugging Face model with parameters of their own, which its plan does not name."""
    for name, child in inner.named_children():
        if f"{name}." != core and name not in plan and any(True for _ in child.parameters()):
            yield name


def state_names(model: nn.Module) -> Iterator[str]:
    """Yield the names of a model's parameters and of those buffers that are part of its state."""
    yield from (name for name, _ in model.named_parameters())
    for prefix, module in model.named_modules():
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        yield from (f"{prefix}.{name}".lstrip(".") for name in kept if module._buffers[name] is not None)


class Passing(nn.Identity):
    """The stand-in for a module of another stage: it hands on the first argument and ignores the others.

    Args:
        original: the module, of which a forward may read plain attributes, such as its kind of attention.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(original).items() if isinstance(value, str | int | float | bool)}
        self.__dict__.update({name: value for name, value in plain.items() if name != "training"})

    def forward(self, first: Any, *_others: Any, **_named: Any) -> Any:  # type: ignore[override]
        """Return the first argument."""
        return first


class Ends:
    """The two ends of a stage in a call of its forward: hooks of its modules fill and read them."""

    def __init__(self) -> None:
        self._received: Any = None
        self._gave: Any = None

    def bind(self, part: nn.Module, before: str | None, last: str | None) -> None:
        """Register the hooks.

        Args:
            part: the stage.
            before: the stand-in that gives what the stage received; None: tokens enter the stage.
            last: the module whose output is handed on; None: the model's own first output is.
        """
        part.register_forward_pre_hook(self._receive)
        if before is not None:
            part.get_submodule(before).register_forward_hook(lambda *_: self._received)
        if last is not None:
            part.get_submodule(last).register_forward_hook(torch.compiler.disable(self._keep))  # type: ignore[no-untyped-call]
        part.register_forward_hook(self._hand_on)
        self._is_last = last is None

    def _receive(self, _part: nn.Module, inputs: tuple[Any, ...]) -> None:
        (self._received,) = inputs

    def _keep(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        self._gave = outputs

    def _hand_on(self, _part: nn.Module, _inputs: Any, outputs: Any) -> Any:
        found = first_output(outputs) if self._is_last else self._gave
        self._received = self._gave = None  # no tensor is held from pass to pass
        return found


def first_output(outputs: Any) -> Any:
    """Return what a model's outputs hold first, such as the logits."""
    return next(iter(outputs.values())) if isinstance(outputs, Mapping) else outputs


def outputs_of(model: nn.Module, pieces: Sequence[str]) -> Callable[[Any], Any]:
    """Return the function that makes the outputs of the whole model from the tensor of the last stage.

    Args:
        model: with a planned chain and without `chain_faults`.
        pieces: the names of its chain, opened.
    """
    outputs = _trial(model, pieces, None).outputs
    if not isinstance(outputs, Mapping):
        return lambda tensor: tensor
    kind, key = type(outputs), next(iter(outputs))
    return lambda tensor: kind(**{key: tensor})


def chain_faults(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[str]:
    """Return the reasons why the stages of a planned chain would not compute what the model computes; at most one.

    Args:
        model: with a planned chain.
        stages: the names of the pieces of each stage.
    """
    kind, pieces = type(model).__name__, [name for names in stages for name in names]
    if more := _configured_outputs(model):
        return [f"{kind} returns {more}, which no single stage has; {WAY_OUT}"]
    try:
        whole = _trial(model, pieces, None)
        if whole.names != pieces:
            planned = f"the chain of transformers' plan is {', '.join(pieces)}"
            return [f"{kind} calls {', '.join(whole.names)}, and {planned}; {WAY_OUT}"]
        if other := _other_outputs(whole.outputs):
            return [f"{kind} returns {other}, which no single stage has; {WAY_OUT}"]
        starts = [pieces.index(names[0]) for names in stages[1:]]
        found = next(filter(None, (_difference(whole, _trial(model, pieces, start), start) for start in starts)), "")
    except Exception as error:
        return [f"{kind} cannot be called in stages ({type(error).__name__}: {error}); {WAY_OUT}"]
    return [f"{kind} {found}, which later stages do not have; {WAY_OUT}"] if found else []


@dataclass(slots=True)
class _Trial:
    """A call of a model's `forward` in which recorders stand for the modules of the chain."""

    names: list[str] = field(default_factory=list)
    """The modules that were called, in this order."""
    took: list[Any] = field(default_factory=list)
    """The first argument of each."""
    beside: list[list[Any]] = field(default_factory=list)
    """The other arguments of each, as leaves."""
    outputs: Any = None
    """The result of the call."""


class _Recorder(Passing):
    """A module of the chain in a trial, which gives the same numbers in each."""

    def __init__(self, original: nn.Module, name: str, trial: _Trial, gives: torch.Tensor | None) -> None:
        super().__init__(original)
        self._name, self._trial, self._gives = name, trial, gives

    def forward(self, first: Any, *others: Any, **named: Any) -> Any:  # type: ignore[override]
        trial = self._trial
        trial.names.append(self._name)
        trial.took.append(first.clone() if isinstance(first, torch.Tensor) else first)
        trial.beside.append([leaf for leaf in pytree.tree_leaves((others, named)) if _is_comparable(leaf)])
        return first if self._gives is None else self._gives.clone()


def _is_comparable(value: Any) -> bool:
    """Return whether a value can be compared; a cache of keys cannot, and is new in each call."""
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


def _trial(model: nn.Module, pieces: Sequence[str], start: int | None) -> _Trial:
    """Return what a call of the model does around the modules of its chain.

    Args:
        model: of any size, also on meta: no weight of it is used.
        pieces: the names of its chain, opened.
        start: the index of the piece with which a stage begins, which takes hidden values; None: the model is whole,
            and takes tokens.
    """
    trial, generator = _Trial(), torch.Generator().manual_seed(0)
    ((_, inner),) = hugging_face_models(model)
    shape = (ROWS, WORDS, int(inner.config.get_text_config().hidden_size))
    modules = {name: model.get_submodule(name) for name in pieces}
    skeleton = copy.deepcopy(model, {id(module): nn.Identity() for module in modules.values()})
    for index, (name, module) in enumerate(modules.items()):
        given = torch.randn(shape, generator=generator)
        is_skipped = start is not None and index < start - 1  # it hands on what the stage received
        skeleton.set_submodule(name, _Recorder(module, name, trial, None if is_skipped else given))
    for module in skeleton.modules():
        for name, table in module._buffers.items():
            if table is not None and (table.is_meta or table.is_floating_point()):
                module._buffers[name] = torch.rand(table.shape, generator=generator).to(table.dtype)
    tokens = torch.arange(ROWS * WORDS).reshape(ROWS, WORDS) % 3  # also the word of padding, which mostly is 0
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        trial.outputs = skeleton.train()(tokens if start is None else torch.randn(shape))
    return trial


def _difference(whole: _Trial, stage: _Trial, start: int) -> str:
    """Return what a stage's modules, or the loss, see otherwise than in the whole model; "": nothing."""
    for index in range(start, len(whole.names)):
        before, name = whole.names[index - 1 : index + 1]
        if not _equal(whole.took[index], stage.took[index]) or whole.took[index].dim() != whole.took[1].dim():
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
        return one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two)
    return type(one) is type(two) and bool(one == two)


def _configured_outputs(model: nn.Module) -> str:
    """Return what a model's configuration adds to its outputs, of each layer: in words."""
    ((_, inner),) = hugging_face_models(model)
    flags = ("output_hidden_states", "output_attentions", "output_router_logits")
    return ", ".join(flag.removeprefix("output_") for flag in flags if getattr(inner.config, flag, False))


def _other_outputs(outputs: Any) -> str:
    """Return what a model returns beside a first tensor: in words. A cache of keys may be there: no loss takes it."""
    if isinstance(outputs, torch.Tensor):
        return ""
    if not isinstance(outputs, Mapping) or not isinstance(first_output(outputs), torch.Tensor):
        return f"a {type(outputs).__name__}"
    later = list(outputs.items())[1:]
    return ", ".join(name for name, value in later if isinstance(value, torch.Tensor | tuple | list))

"""Trial of the parameters that a task's code holds beside their modules, or reads on a stage that does not have them.

The wrappers of a plan put other objects in the places of a model's parameters. A list, a closure, a weak reference or
a view that the model, the loss or a hook keeps would keep the first values forever. So a model that is thrown away
gets equal copies in the places of its parameters and takes a pass: an operation that uses the memory of an original
one shows that it is held. And the stages of a pipeline run one after another: none may use a parameter of another.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from atoll.ground.printable import some_of
from atoll.parallel.engine.attached import hooks_of
from atoll.parallel.engine.blueprint import blueprint_of, cut, stage
from atoll.parallel.huggingface.pipeline_stages import INPUTS
from atoll.parallel.trials.watched import Uses, storage_of
from atoll.parallel.trials.way import MeshWay
from atoll.task.randomness import states_of_generators


def references(way: MeshWay) -> Iterator[str]:
    """Yield the reasons why a plan would give the task's code other parameters than it reads.

    The model of the way has its parameters, but may have gradients, afterwards.
    """
    model, plan = way.model, way.plan
    with _copies(model) as originals:
        held = Uses({storage_of(original): name for name, original in originals.items()})
        foreign: set[str] = set()
        with suppress(Exception), held:  # any: the task's code; what fails here fails in the first step, too
            _pass(way)
        if plan.mesh.pp > 1:
            with suppress(Exception):
                foreign = _foreign(way, originals)
        registered = {name for name, copy in model.named_parameters() if hooks_of(copy)}
        drawn = _call_hooks(model, originals, held)
    if held.borrowed and (plan.is_sharded or plan.mesh.tp > 1):
        yield (
            f"{_listed(held.borrowed)}: the model, the loss or a hook reads a parameter that it holds beside its "
            f"module (in a list, a closure, a view), and {way.where} puts others in the places of parameters: read it "
            "from its module in each pass, or use dp_replicate"
        )
    if foreign:
        yield (
            f"{_listed(foreign)}: another stage of the pipeline, or the loss, reads this parameter, which is trained "
            "on its stage alone: put both into one layer, or use pp=1"
        )
    if registered:
        yield (
            f"{_listed(registered)}: a forward pass registers a hook on it, which would see the gradient of a part of "
            "the batch: register it in task.model(), or train in one process without micro-batches"
        )
    if drawn:
        yield (
            f"{_listed(drawn)}: a hook draws random numbers, and each rank draws different ones: give it a "
            "generator with a fixed seed, or train in one process"
        )


@contextmanager
def _copies(model: nn.Module) -> Iterator[Mapping[str, nn.Parameter]]:
    """Put a copy into each place of each parameter for the block; provide the originals by name, and put them back."""
    originals = dict(model.named_parameters())
    places = [
        (module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None
    ]
    copies: dict[int, nn.Parameter] = {}
    for original in originals.values():
        copy = nn.Parameter(original.detach().clone(), requires_grad=original.requires_grad)
        vars(copy).update(vars(original))
        copies[id(original)] = copy
    try:
        for module, name, original in places:
            _put(module, name, copies[id(original)])
        yield originals
    finally:
        for module, name, original in places:
            _put(module, name, original)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter into a module as `fully_shard` does: a module that keeps a list of its parameters updates it."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


def _pass(way: MeshWay) -> None:
    inputs, targets = way.two
    found = way.task.loss(way.model(inputs), targets)
    if isinstance(found, torch.Tensor) and found.requires_grad:
        found.sum().backward()  # type: ignore[no-untyped-call]


def _foreign(way: MeshWay, originals: Mapping[str, nn.Parameter]) -> set[str]:
    """Return the parameters that a stage, or the loss, uses and that are on other stages alone.

    A loss may hold an original, too: a stage trains the model's parameters.
    """
    model, (inputs, targets) = way.model, way.two
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    storages = {storage_of(p): name for name, p in (*model.named_parameters(), *originals.items())}
    options = {INPUTS: inputs} if blueprint_of(model).is_planned else {}
    parts = [stage(model, names) for names in cut(model, way.plan.num_stages)]
    found: set[str] = set()
    hidden = inputs
    for part in parts:
        here = {name_of[id(parameter)] for parameter in part.parameters() if id(parameter) in name_of}
        uses = Uses({place: name for place, name in storages.items() if name not in here})
        with uses:
            hidden = part(hidden, **options)
            if part is parts[-1] and not options:
                with suppress(Exception):
                    way.task.loss(hidden, targets)
        found |= uses.borrowed
    return found


def _call_hooks(model: nn.Module, originals: Mapping[str, nn.Parameter], held: Uses) -> set[str]:
    """Call the hooks of each parameter with a gradient; return the names of parameters whose hooks draw.

    A hook may read its parameter: the original has the memory of the copy meanwhile.
    """
    drawn = set()
    for name, copy in model.named_parameters():
        original = originals[name]
        if not (hooks := hooks_of(original)):
            continue
        values, before = original.data, states_of_generators()
        original.data = copy.detach()
        original.grad = torch.zeros_like(copy) if copy.grad is None else copy.grad
        with suppress(Exception), torch.no_grad(), held:
            for hook in hooks:
                hook(original if hook in _accumulated(original) else original.grad)
        original.data, original.grad = values, None
        if states_of_generators() != before:
            drawn.add(name)
    return drawn


def _accumulated(parameter: Any) -> list[Any]:
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def _listed(names: set[str]) -> str:
    return some_of(sorted(names), 3)

"""The pipeline of a Hugging Face model, planned from the model itself, without a table of models.

    transformer.wte, transformer.wpe | transformer.h.0, transformer.h.1, ... | transformer.ln_f, lm_head

The layers are the items of the heaviest ModuleList; the chain is they and all other modules with state beside the list,
or beside a module in which it lies. A stage begins with the model or after its words are embedded.

Each stage runs the whole `forward` on the model's inputs, with stand-ins for the modules of other stages. The last
one before the stage gives what the stage received; the stage hands on what its last module gave. So what a model
computes between two modules (Granite scales the words, Gemma 2 caps the logits) is computed once, by the later stage,
and what it computes of its inputs (masks, positions, the place of the last word) by every stage.

All must follow from the received values and the inputs alone, which a trial finds out (`pipeline_trial`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from atoll.parallel.huggingface.tensor_plan import hugging_face_models


def planned_chain(model: nn.Module) -> tuple[str, ...]:
    """Return the chain of a Hugging Face model, or of one that has it inside, in the order of definition.

    A ModuleList stands for its items. Each stage keeps the tables beside the chain, such as rotary embeddings'.
    Empty if there are no layers or several lists of them, as in an encoder with a decoder, or if the chain leaves out
    state.
    """
    if len(list(hugging_face_models(model))) != 1 or not (layers := layers_of(model)):
        return ()
    names = tuple(_beside(model, "", layers))
    closed = [module for name in names if not isinstance(module := model.get_submodule(name), nn.ModuleList)]
    if any(True for module in closed for _ in _lists(module)):
        return ()
    inside = tuple(f"{name}." for name in names)
    return names if all(tensor.startswith(inside) for tensor in state_names(model)) else ()


def layers_of(model: nn.Module) -> str:
    """Return the name of the heaviest of a model's outermost lists of modules; "": it has none with parameters."""
    sizes = {name: sum(map(torch.Tensor.numel, items.parameters())) for name, items in _lists(model)}
    heaviest = max(sizes, key=lambda name: sizes[name], default="")
    return heaviest if sizes.get(heaviest) else ""


def _lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the outermost lists of modules within a module."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield prefix + name, child
        else:
            yield from _lists(child, f"{prefix}{name}.")


def _beside(module: nn.Module, prefix: str, layers: str) -> Iterator[str]:
    """Yield the list of layers, and the modules with state beside it or beside one of its enclosing modules."""
    for name, child in module.named_children():
        if layers.startswith(f"{prefix}{name}."):
            yield from _beside(child, f"{prefix}{name}.", layers)
        elif any(True for _ in state_names(child)):
            yield prefix + name


def state_names(model: nn.Module) -> Iterator[str]:
    """Yield the names of a model's parameters and of those buffers that are part of its state."""
    yield from (name for name, _ in model.named_parameters())
    for prefix, module in model.named_modules():
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        yield from (f"{prefix}.{name}".lstrip(".") for name in kept if module._buffers[name] is not None)


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of a planned chain by its model."""

    names: list[str]
    """The pieces, in the order of their calls."""
    num_first: int
    """The pieces before the first layer, which embed the inputs."""
    length: int
    """The length of the tuple that the model takes from each layer, of which it uses the first tensor; 0: it takes the
    tensor itself."""

    @property
    def earliest(self) -> int:
        """The index of the first piece with which a later stage can begin: outputs of embeddings are not one value."""
        return self.num_first + (self.num_first > 1)

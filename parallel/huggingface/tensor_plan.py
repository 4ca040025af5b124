"""The tensor parallelism of a Hugging Face model: transformers' plan for it, carried over to PEFT's LoRA layers.

The plan names the cut of each linear layer's weight (out, in), of what it takes and of what it gives:

    colwise                  rows (out), takes whole features, gives its part of the features
    colwise_gather_output    the same, gives whole features
    rowwise                  columns (in), takes its part of the features, gives the sum over the ranks
    rowwise_split_input      the same, takes whole features
    embedding_rowwise        words, gives the sum over the ranks

LoRA adds B A x to W x. What is not named here is whole on each rank, which then computes it as the others do:

    W                        A        B
    cut by its rows          whole    cut as W
    cut by its columns       as W     whole
"""

import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from atoll.ground.printable import count_of

COLUMNS = ("colwise", "colwise_gather_output")
ROWS = ("rowwise", "rowwise_split_input")
TABLE = "embedding_rowwise"
SAME = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
"""The cuts that transformers names otherwise, by those names."""

WHOLE = "replicate"
WHOLE_IN_PARTS = "replicated_with_grad_allreduce"
"""A norm of each head: its gradient would be the sum over the ranks, of which each has other heads."""

HEADS = ("num_attention_heads", "num_key_value_heads")


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """Return how tensor parallelism shards each layer, by name; empty: transformers has no plan for the model.

    Args:
        model: a model of Hugging Face, or one that has it inside, as a `PeftModel` does.
    """
    found = {name: place for name, place in _planned(model).items() if place[1] != TABLE or _is_cut(place[0])}
    for names in _tied(model):  # one weight has one cut
        if not all(name in found for name in names):
            found = {name: place for name, place in found.items() if name not in names}
    return {name: kind for whole, (module, kind) in found.items() for name, kind in _inside(whole, module, kind)}


def divisible_by_tp(model: nn.Module) -> dict[str, int]:
    """Return the numbers that tp must divide: the numbers of heads, and of the features that are sharded."""
    numbers: dict[str, int] = {}
    for _, inner in hugging_face_models(model):
        config: Any = inner.config.get_text_config()
        numbers |= {name: number for name in HEADS if isinstance(number := getattr(config, name, None), int)}
    for name, (module, kind) in _planned(model).items():
        base = _base_of(module)
        if kind in (COLUMNS[0], *ROWS) and isinstance(base, nn.Linear):
            features = base.out_features if kind in COLUMNS else base.in_features
            numbers[f"features of {name.rpartition('.')[2]}"] = features
    return numbers


def tensor_plan_faults(model: nn.Module) -> list[str]:
    """Return the reasons why tensor parallelism cannot divide a Hugging Face model, with the way out."""
    found: dict[str, list[str]] = {}
    for name, reason in (*_adapter_faults(model), *_plan_faults(model)):
        found.setdefault(reason, []).append(name)
    return [f"{_listed(names)}: {reason}" for reason, names in found.items()]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {count_of(len(names) - 1, 'other layer')}"


def _plan_faults(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the layers that the engine cannot divide as the plan says, each with the reason."""
    for name, (module, kind) in _planned(model).items():
        base = _base_of(module)
        if kind == WHOLE_IN_PARTS:
            if any(parameter.requires_grad for parameter in module.parameters()):
                yield (
                    name,
                    "under tp each rank has different heads, and its trained weights are for all; freeze them, or tp=1",
                )
        elif kind not in (*COLUMNS, *ROWS, TABLE, WHOLE):
            yield name, f"transformers' plan divides it as {kind!r}, which this engine does not; allowed: tp=1"
        elif kind in (*COLUMNS, *ROWS) and type(base) is not nn.Linear and not _is_adapter(module):
            yield name, f"tp divides layers of nn.Linear, got {type(base).__name__}; allowed: tp=1"


def hugging_face_models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the models of Hugging Face in a model, none inside another. Only the model's code imports them."""
    if (library := sys.modules.get("transformers.modeling_utils")) is None:
        return
    outer: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(seen == "" or name.startswith(f"{seen}.") for seen in outer)
        if isinstance(module, library.PreTrainedModel) and not is_inside:
            outer.append(name)
            yield name, module


def _planned(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """Return the modules, or parameters, that plans name, with their kinds, by name."""
    found = {}
    for prefix, inner in hugging_face_models(model):
        places = {**dict(inner.named_modules()), **dict(inner.named_parameters())}
        for pattern, kind in (getattr(inner, "_tp_plan", None) or {}).items():
            for name, place in places.items():
                if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern):
                    found[f"{prefix}.{name}".lstrip(".")] = (place, SAME.get(kind, kind))
    return found


def _is_cut(table: Any) -> bool:
    """Return whether an embedding table is sharded by words over the ranks.

    A table with a word that is never trained (`padding_idx`), or of another class with a scale, is whole on each rank:
    a part would know neither.
    """
    base = _base_of(table)
    return type(base) is nn.Embedding and (base.padding_idx is None or not base.weight.requires_grad)


def _tied(model: nn.Module) -> Iterator[list[str]]:
    """Yield the modules that share one weight (tied weights)."""
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.endswith(".weight"):
            module = name.removesuffix(".weight").removesuffix(".base_layer")
            places.setdefault(id(parameter), []).append(module)
    return (names for names in places.values() if len(names) > 1)


def _base_of(module: Any) -> Any:
    """Return the layer under PEFT's, or the layer itself."""
    base = getattr(module, "base_layer", None)
    return base if isinstance(base, nn.Module) else module


def _inside(name: str, module: Any, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the sharding of a layer, or of the LoRA layers that PEFT has put in its place."""
    if _base_of(module) is module:
        yield name, kind
        return
    yield f"{name}.base_layer", kind
    factor = "lora_B" if kind in COLUMNS else "lora_A"
    for adapter in getattr(module, factor, {}):
        yield f"{name}.{factor}.{adapter}", kind


def _is_adapter(module: object) -> bool:
    """Return whether a module is one of PEFT's, which has a separate sentence if it cannot be divided."""
    return type(module).__module__.partition(".")[0] == "peft"


def _adapter_faults(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the adapters that are no LoRA of a linear layer, each with the reason."""
    if (peft := sys.modules.get("peft")) is None:
        return
    from peft.tuners.lora.layer import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    def reason(kind: str) -> str:
        return (
            f"tp divides the LoRA of linear layers alone, got {kind}; leave it out of PEFT's config, or use tp=1 "
            "(dp_shard divides all adapters)"
        )

    for name, module in model.named_modules():
        if isinstance(module, peft.PeftModel):
            others = {of.peft_type.value for of in module.peft_config.values()} - {"LORA"}
            yield from ((name or type(module).__name__, reason(kind)) for kind in sorted(others))
        elif type(module) is Linear:
            variants = {
                type(variant).__name__.removesuffix("LinearVariant") for variant in module.lora_variant.values()
            }
            yield from ((name, reason(f"its variant {variant}")) for variant in sorted(variants))
            if type(module.base_layer) is not nn.Linear:
                yield name, reason(f"one of {type(module.base_layer).__name__}")
        elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            yield name, reason(f"{type(module).__name__} ({type(module).__module__})")

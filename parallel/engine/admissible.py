"""The tensors of a model that the wrappers of a plan cannot take: refused before a process group exists, or adapted."""

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from atoll.ground.printable import some_of
from atoll.parallel.engine.plan import Plan
from atoll.training.model.parameters import overlaps_itself

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def lazy_faults(model: nn.Module) -> Iterator[str]:
    """Yield a sentence if tensors of the model have no shape yet (`nn.LazyLinear` and its kind)."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        yield (
            f"{some_of(lazy, 3)} {_have(lazy)} no shape before the first batch: give the layer its sizes (nn.Linear "
            "for nn.LazyLinear), or let the task's model function pass one batch through the model"
        )


def tensor_faults(model: nn.Module, plan: Plan, groups: dict[str, str]) -> Iterator[str]:
    """Yield a sentence for each kind of tensor that this plan cannot train as a plain loop does.

    Args:
        model: the whole model, no tensor lazy; on `meta` or not.
        plan: the plan of the training.
        groups: the block that gathers each parameter, by the parameter's name.
    """
    if overlapping := [name for name, tensor in model.named_parameters() if overlaps_itself(tensor)]:
        yield (
            f"{some_of(overlapping, 3)}: several elements share one place in memory (expand), which no optimizer can "
            "step; keep the small tensor as the parameter and expand it in forward, or clone() it"
        )
    if not plan.is_sharded and plan.mesh.size == 1:
        return
    where = f"{plan.mesh}" + (f" with zero={plan.zero_stage}" if plan.is_sharded else "")
    yield from _module_faults(model, where)
    if plan.is_sharded or plan.mesh.tp > 1:
        yield from _of_other_classes(model, where)
    if not plan.is_ddp:
        for first, second in _sharing(model):
            yield (
                f"{first} and {second} are views of one memory, which {where} would separate; tie them as one "
                "nn.Parameter, or clone() one of them"
            )
    if plan.is_sharded:
        if empty := [name for name, tensor in model.named_parameters() if tensor.numel() == 0]:
            yield f"{some_of(empty, 3)}: no elements, which {where} cannot shard; leave it out, or use dp_replicate"
        yield from _mixed(model, groups)


def _module_faults(model: nn.Module, where: str) -> Iterator[str]:
    scripted = [name or "the model" for name, module in model.named_modules() if isinstance(module, ScriptModule)]
    if scripted:
        yield (
            f"{scripted[0]}: compiled by torch.jit, whose modules take no hooks, so {where} cannot train it; return "
            "the module without torch.jit from task.model(), or train on one process"
        )
    for name, module in model.named_modules():
        if isinstance(module, EMBEDDINGS) and module.max_norm is not None:
            yield (
                f"{name or type(module).__name__}: max_norm={module.max_norm:g} changes the weight in every forward "
                f"pass, on each rank by its own examples, so {where} would train another model than one process; "
                "train it on one process, or without max_norm"
            )


def _of_other_classes(model: nn.Module, where: str) -> Iterator[str]:
    """Yield a sentence for each parameter of a custom class, which the wrappers cannot shard."""
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            yield (
                f"{name} is a {type(parameter).__name__}, and {where} puts parameters of torch's class in its place: "
                "use nn.Parameter with an attribute, or dp_replicate"
            )


def _mixed(model: nn.Module, groups: dict[str, str]) -> Iterator[str]:
    """Yield the groups with trained parameters of several dtypes: `fully_shard` gathers a group as one tensor."""
    found: dict[str, dict[torch.dtype, str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dim():
            found.setdefault(groups[name], {}).setdefault(parameter.dtype, name)
    for group, firsts in found.items():
        if len(firsts) > 1:
            kinds = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in firsts.items())
            yield (
                f"{group or type(model).__name__} mixes dtypes, and shards (dp_shard, zero, offload) need one in a "
                f"block: {kinds}; use one dtype (plan.precision=bf16 computes in bfloat16), or dp_replicate"
            )


def fit(part: nn.Module, plan: Plan) -> None:
    """Change the memory layout of a part's tensors to one that every wrapper accepts; values, names and objects stay.

    Parameters become contiguous where they are cut, and in a pipeline: what its stages send must be, and the output of
    a convolution has the format of its weight. (One of a single channel is contiguous in two formats.) A buffer whose
    elements share memory becomes a full one, which a broadcast and a checkpoint can write. Embeddings have dense
    gradients: the same numbers for every optimizer of the trainer, and ones that can be clipped, reduced and saved.
    """
    copies: dict[int, torch.Tensor] = {}
    for module in part.modules():
        if isinstance(module, EMBEDDINGS):
            module.sparse = False
        for name, buffer in module._buffers.items():
            if buffer is not None and overlaps_itself(buffer):
                module._buffers[name] = copies.setdefault(id(buffer), buffer.contiguous())
    if plan.is_sharded or plan.mesh.tp > 1 or plan.mesh.pp > 1:
        for parameter in part.parameters():
            if (
                parameter.stride()
                != torch.empty_like(parameter, device="meta", memory_format=torch.contiguous_format).stride()
            ):
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _sharing(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield pairs of a parameter and another tensor, not the same object, that overlap in memory."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout == torch.strided and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    for tensors in by_storage.values():
        for (first, one), (second, other) in combinations(tensors, 2):
            if isinstance(one, nn.Parameter) and _meet(one, other):
                yield first, second


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage overlap."""
    if one.dtype != other.dtype:
        return True
    ends = [
        1 + t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        for t in (one, other)
    ]
    if max(one.storage_offset(), other.storage_offset()) >= min(ends):
        return False
    taken = torch.zeros(max(ends), dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _have(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"

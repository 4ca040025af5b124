"""Detection of the storages that a model's pass reads outside of its blocks' calls, or writes to.

`fully_shard` gathers a block's parameters for its call alone: a use elsewhere, such as `linear(x, block.weight)`, needs
the block gathered for the whole pass. A change in place of a gathered copy is lost, and a stage of a pipeline runs
passes that a plain loop does not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.parallel.engine.buffers import saved_buffers

BATCH_NORMS = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})
"""The operators that write to their running statistics, the fourth and the fifth argument, and do not declare it."""


class _Writes(TorchDispatchMode):
    """Dispatch mode that records the storages to which operators write, also through views and `.data`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        schema = getattr(func, "_schema", None)  # a higher-order operator has none
        if schema is not None and schema.name in BATCH_NORMS:
            self.storages |= {storage_of(statistic) for statistic in args[3:5] if statistic is not None}
        for index, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else given.get(argument.name)
                self.storages |= {storage_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        return func(*args, **given)


@dataclass(frozen=True, slots=True)
class Written:
    """The names of a model's tensors that a pass changes in place, or whose data the pass replaces."""

    parameters: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    """The changed buffers that are state; all others are tables that a model could compute again."""


def written_in_forward(model: nn.Module, run: Callable[[], Any]) -> Written:
    """Run a pass, and return the names of the model's tensors that the pass changes in place.

    Args:
        model: the model whose tensors are watched; on `meta` or not. The pass may change it.
        run: () -> the pass.
    """
    before = _places(model)
    writes = _Writes()
    with writes:
        run()
    after = _places(model)
    changed = [name for name, (_, place) in before.items() if place in writes.storages or _moved(after, name, place)]
    parameters = [name for name in changed if isinstance(before[name][0], nn.Parameter)]
    return Written(parameters, [name for name in changed if name not in parameters])


def _places(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Return the parameters and the buffers that are state by name, each with the identity of its memory.

    They are read from the modules, as a hook of the state_dict may make new tensors in each call.
    """
    saved = {id(buffer) for _, _, buffer in saved_buffers(model)}
    tensors = [*model.named_parameters(), *(pair for pair in model.named_buffers() if id(pair[1]) in saved)]
    return {name: (tensor, storage_of(tensor)) for name, tensor in tensors}


def _moved(after: Mapping[str, tuple[torch.Tensor, int]], name: str, place: int) -> bool:
    return name not in after or after[name][1] != place


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of the memory that a tensor is a view of, for as long as it lives."""
    place: int = tensor.untyped_storage()._cdata
    return place


class Uses(TorchDispatchMode):
    """Dispatch mode that records the blocks whose parameters operators use while the block is not being called."""

    def __init__(self, block_of: Mapping[int, str], is_called: Callable[[str], bool] = lambda _name: False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block_of, self._is_called = block_of, is_called
        self.borrowed: set[str] = set()

    def note(self, values: Any) -> None:
        """Record the blocks of all parameters among some values."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                block = self._block_of.get(storage_of(leaf))
                if block is not None and not self._is_called(block):
                    self.borrowed.add(block)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.note((args, kwargs))
        return func(*args, **(kwargs or {}))


def borrowed_blocks(model: nn.Module, block_names: Iterable[str], run: Callable[[], Any]) -> list[str]:
    """Return the blocks of which a pass uses, or returns, a parameter outside of their call; "" for the model itself.

    The model itself is borrowed from if it returns a parameter that lies in no block, for the loss.

    Args:
        model: the model whose blocks are watched; on `meta` or not.
        block_names: the names of the blocks (`blueprint.blocks`); a parameter of several belongs to the last one.
        run: () -> the outputs of the pass.
    """
    blocks = {name: model.get_submodule(name) for name in block_names}
    depth = dict.fromkeys(blocks, 0)
    uses = Uses(
        {storage_of(parameter): name for name, block in blocks.items() for parameter in block.parameters()},
        lambda name: depth[name] > 0,
    )

    def step(name: str, by: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            depth[name] += by

        return hook

    hooks = [block.register_forward_pre_hook(step(name, 1)) for name, block in blocks.items()]
    hooks += [block.register_forward_hook(step(name, -1), always_call=True) for name, block in blocks.items()]
    try:
        with uses:
            outputs = run()
        uses.note(outputs)
    finally:
        for hook in hooks:
            hook.remove()
    places = [storage_of(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    is_returned = any(storage_of(parameter) in places for parameter in model.parameters())
    return [name for name in blocks if name in uses.borrowed] + ([""] if is_returned else [])

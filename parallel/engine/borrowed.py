"""The blocks of which a forward pass uses a parameter outside of the block's call, such as `linear(x, block.weight)`.

`fully_shard` gathers a block's parameters for its call alone: elsewhere there is only a shard. So such a block is
gathered with the whole model, for the whole pass.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.parallel.engine.inplace import storage_of
from atoll.parallel.engine.passes import first_cause

_SIGNS = ("mixed torch.Tensor and DTensor", "storage of size 0")
"""Parts of torch's messages where a pass meets the shards of a parameter, or the freed memory of a gathered one."""


class NotGathered(ValueError):
    """A forward or backward pass used a parameter where its shards are not gathered."""


_IN_PLACE = "_ToTorchTensor is a view and is being modified inplace"
"""The sign of a change in place of a layer's result under tp."""


_NO_STRATEGY = "does not have a sharding strategy registered"
"""The sign of an operator that torch cannot compute on the tensors of tp."""


@contextmanager
def pass_of_shards(tp: int) -> Iterator[None]:
    """Turn torch's errors about shards in a pass of a sharded model into one that names the way out.

    Args:
        tp: the degree of tensor parallelism.

    Raises:
        NotGathered: in place of the `RuntimeError`; the trial pass has not met this use (`borrowed_blocks`).
    """
    try:
        yield
    except RuntimeError as error:
        said = str(first_cause(error))
        if tp > 1 and _IN_PLACE in said:
            raise NotGathered(
                f"tp={tp}: forward changes the result of a layer in place, such as by ReLU(inplace=True), which torch "
                "cannot follow on tensors that tp hands out: use inplace=False, or tp=1"
            ) from error
        if tp > 1 and _NO_STRATEGY in said:
            raise NotGathered(f"tp={tp}: {said.rstrip('.')} in torch, so tp cannot run this model: use tp=1") from error
        if not any(sign in said for sign in _SIGNS):
            raise
        raise NotGathered(
            "the model uses a parameter outside of the call of its block, where its shards are not gathered: call the "
            f"block, or train with dp_replicate{' and tp=1' if tp > 1 else ''} or on one process "
            f"(torch: {said.partition(', need')[0]})"
        ) from error


class Uses(TorchDispatchMode):
    """The storages that operators have used while the block that they belong to was not being called."""

    def __init__(self, block_of: Mapping[int, str], is_called: Callable[[str], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block_of, self._is_called = block_of, is_called
        self.borrowed: set[str] = set()

    def note(self, values: Any) -> None:
        """Note the blocks of all parameters among some values."""
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
        model: whose blocks are watched; on `meta` or not.
        block_names: of the blocks (`blueprint.blocks`); a parameter of several belongs to the last one.
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

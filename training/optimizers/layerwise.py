"""The common part of the layer-wise optimizers: they work on this rank's shards, and treat each tensor as one layer.

The state of a sharded parameter is sharded like it (a DTensor), so `torch.distributed.checkpoint` can save it; a state
of one number per layer is a 0-d tensor, the same on all ranks. Nothing here waits for the device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.ground.faults import Refused
from atoll.training.optimizers.dtensor import is_dtensor
from atoll.training.optimizers.norms import local, norms_of_shards
from atoll.training.optimizers.options import RULES


@dataclass(frozen=True, slots=True)
class Block:
    """Parameters of one group that are stepped alike."""

    group: dict[str, Any]
    """The group's learning rate and other options."""

    is_skipped: bool
    """Whether the parameters are biases and norms, which get no trust ratio and no weight decay."""

    parameters: list[Tensor]
    """The parameters as the model has them."""

    weights: list[Tensor]
    """This rank's shards of the parameters; a step changes these in place."""

    gradients: list[Tensor]
    """This rank's shards of their gradients, sharded in the same way."""

    @property
    def weight_decay(self) -> float:
        """The decay β, which is zero for skipped parameters."""
        return 0.0 if self.is_skipped else float(self.group["weight_decay"])


class LayerwiseOptimizer(Optimizer):
    """An optimizer whose step needs the norm of each layer.

    Args:
        parameters: the parameters or groups, as for every torch optimizer; plain tensors and DTensors may be mixed.
        defaults: the defaults of the groups' options, with `skip_1d` and `weight_decay` among them.
    """

    def __init__(self, parameters: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on all parameters that have a gradient; return the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if blocks := self._blocks():
            self._update(blocks)
        return loss

    def _update(self, blocks: list[Block]) -> None:
        """Change the weights; the norms of all blocks should be requested at once."""
        raise NotImplementedError

    def _blocks(self) -> list[Block]:
        blocks = []
        for group in self.param_groups:
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            for is_skipped in (False, True):
                chosen = [p for p in with_gradient if (bool(group["skip_1d"]) and p.ndim <= 1) is is_skipped]
                if chosen:
                    gradients = [_gradient(parameter) for parameter in chosen]
                    blocks.append(Block(group, is_skipped, chosen, [local(p) for p in chosen], gradients))
        return blocks

    def _buffers(self, block: Block, key: str) -> list[Tensor]:
        """Return the shards of a state of the parameter's shape; zeros at first."""
        for parameter in block.parameters:
            if key not in self.state[parameter]:
                self.state[parameter][key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [local(self.state[parameter][key]) for parameter in block.parameters]


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        raise ValueError("a parameter without a gradient takes part in no step")
    if gradient.is_sparse:
        raise ValueError("a sparse gradient has no layer-wise step; use a dense embedding")
    if is_dtensor(parameter) and is_dtensor(gradient):
        if gradient.placements != parameter.placements:  # such as an unfinished sum over ranks
            gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return local(gradient)


def norms_by_block(blocks: Sequence[Block], *kinds: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Return the norms of all layers, with one exchange: for each block and kind a tensor (layers of the block,).

    Args:
        blocks: the blocks, with the parameters, which tell the sharding.
        kinds: such as the weights and the gradients; for each block a list of shards.
    """
    shards = [shard for kind in kinds for block_shards in kind for shard in block_shards]
    layouts = [parameter for block in blocks for parameter in block.parameters] * len(kinds)
    sizes = [len(block.parameters) for block in blocks]
    split = torch.split(norms_of_shards(shards, layouts), sizes * len(kinds))
    return [tuple(split[i :: len(blocks)]) for i in range(len(blocks))]


def ratio_or_one(over: Tensor, under: Tensor, *must_be_positive: Tensor) -> Tensor:
    """Return over / under for each layer, and one where a norm is zero, so that a layer of zeros can leave zero."""
    is_defined = torch.stack([norm > 0 for norm in must_be_positive]).all(dim=0)
    return torch.where(is_defined, over / under, torch.ones_like(over))


def check_ranges(optimizer: str, **options: object) -> None:
    """Check all options of an optimizer at once, by the rules of a training's settings (`options.RULES`).

    Args:
        optimizer: the optimizer's name, for the message.
        options: the options, by name; a rate of 0 is allowed, as a schedule may begin or end there.

    Raises:
        ValueError: names each option that is out of range.
    """
    faults = [
        f"{name} {RULES[name].allowed}, got {given!r}"
        for name, given in options.items()
        if not (RULES[name].is_met(given) or (name == "lr" and given == 0))
    ]
    if faults:
        raise Refused(*(f"{optimizer}: {fault}" for fault in faults))

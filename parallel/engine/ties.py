"""Tied weights on different stages of a pipeline, such as an embedding and a head.

Each stage has a copy. The copies' gradients are summed after the passes, so that equal optimizers keep the copies
equal; the norm counts one of them.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from atoll.parallel.engine.axes import Axes
from atoll.training.optimizers.norms import local


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one object, in groups, each in the order of the model."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


class Ties:
    """The tied weights that the cut into stages has separated.

    Every rank of the mesh must build it, at the same point: it creates process groups.

    Args:
        tied: the result of `tied_names` for the whole model.
        places: for each name, the rank on the `pp` axis that has its stage.
        parts: the stages of this rank, each with parameters under the names of the whole model.
        axes: the axes of the mesh.
    """

    def __init__(
        self, tied: Sequence[Sequence[str]], places: dict[str, int], parts: Sequence[nn.Module], axes: Axes
    ) -> None:
        local_ones = dict(pair for part in parts for pair in part.named_parameters(remove_duplicate=False))
        here = axes.coordinates["pp"]
        self._copies: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]] = []
        self._foreign: set[int] = set()
        for names in tied:
            holders = sorted({places[name] for name in names})
            group = _group(holders, axes) if len(holders) > 1 else None
            copies = list({id(local_ones[name]): local_ones[name] for name in names if places[name] == here}.values())
            if copies:
                self._copies.append((copies, group))
                first = [local_ones[names[0]]] if places[names[0]] == here else []
                self._foreign |= {id(copy) for copy in copies} - {id(copy) for copy in first}

    def add_up(self) -> None:
        """Set every copy's gradient to the sum of all copies' gradients; if no pass has used any, leave none."""
        for copies, group in self._copies:
            if not _is_any_used(copies, group):
                continue
            for copy in copies:
                if copy.grad is None:
                    copy.grad = torch.zeros_like(copy)
            gradients = [local(copy.grad) for copy in copies if copy.grad is not None]
            for other in gradients[1:]:
                gradients[0].add_(other)
            if group is not None:
                dist.all_reduce(gradients[0], group=group)
            for other in gradients[1:]:
                other.copy_(gradients[0])

    def owned(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters without the second copies of tied weights."""
        return [parameter for parameter in parameters if id(parameter) not in self._foreign]


def _is_any_used(copies: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> bool:
    """Return whether a pass has used a copy here or on another holder; only a rank without a gradient waits for it."""
    is_used = any(copy.grad is not None for copy in copies)
    if group is None:
        return is_used
    found = torch.tensor([is_used], dtype=torch.int32, device=local(copies[0]).device)  # a flag, not traffic of a plan
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return is_used or isinstance(found, FakeTensor) or bool(found)


def _group(holders: Sequence[int], axes: Axes) -> dist.ProcessGroup | None:
    """Return the group of a weight's holders that share this rank's other coordinates; all ranks create all groups."""
    lines = axes.device_mesh.mesh.flatten(1).T.tolist()  # one for each place on the other axes
    found = None
    for line in lines:
        group = dist.new_group([line[holder] for holder in holders])
        if dist.get_rank() in (line[holder] for holder in holders):
            found = group
    return found

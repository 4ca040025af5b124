"""The outputs of a model for many clients, and the size of its layers' outputs.

A model gives a tensor, or a tree of tensors, each with one row for each example.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.training.data.trees import leaves, map_tensors


def filled(tree: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Return a tree of the same types, filled with other tensors from left to right."""
    each = iter(tensors)
    return map_tensors(lambda _: next(each), tree)


def by_client(tree: Any, clients: int) -> Any:
    """Return (m, n, ...) of tensors (m n, ...)."""
    return map_tensors(lambda tensor: tensor.unflatten(0, (clients, -1)), tree)  # type: ignore[no-untyped-call]


def check_rows(outputs: Any, rows: int) -> None:
    """Check that outputs can be divided by example.

    Raises:
        CannotBatch: they are not tensors with one row for each example.
    """
    for leaf in leaves(outputs):
        if leaf is not None and not (isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,)):
            what = f"a {type(leaf).__name__}" if not isinstance(leaf, torch.Tensor) else f"a tensor {tuple(leaf.shape)}"
            raise CannotBatch(f"the model's outputs have {what}, instead of one row for each example")


def activation_bytes(model: nn.Module, inputs: Any) -> int:
    """Return the size of the outputs of the model's innermost modules [bytes], at least 1.

    Outputs of functions between modules do not count. The hooks remain in the model, so pass a model that is not used
    otherwise.
    """
    sizes = [1]

    def note(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if isinstance(outputs, torch.Tensor):
            sizes.append(outputs.nbytes)

    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(inputs)
    return sum(sizes)

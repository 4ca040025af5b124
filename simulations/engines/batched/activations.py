"""The size of a model's activations."""

from typing import Any

import torch
from torch import nn


def activation_bytes(model: nn.Module, inputs: Any) -> int:
    """Return the size of the outputs of the model's innermost modules [bytes], at least 1.

    Outputs of functions between modules do not count. The hooks remain in the model, so pass one that is not used
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

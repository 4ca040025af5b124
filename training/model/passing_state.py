"""The state of a model that does not travel: buffers outside of its state_dict, such as a cache or a running sum.

A warm model trains in many rounds, and in a simulation for many clients. State that one training leaves in such a
buffer must not reach the next one, whose update would depend on earlier work of its process.
"""

import torch


class PassingState:
    """The non-persistent buffers of a new model, which are restored before each training and evaluation.

    Buffers that a forward pass has registered are removed.

    Args:
        model: the model, on its device.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._first = [
            (module, name, None if tensor is None else tensor.detach().clone())
            for module in model.modules()
            for name, tensor in module._buffers.items()
            if name in module._non_persistent_buffers_set
        ]
        self._seen = [self._mark(module, name) for module, name, _ in self._first]
        self._names = [(module, set(module._non_persistent_buffers_set)) for module in model.modules()]

    def restore(self) -> None:
        """Restore the first value of each buffer; an unchanged buffer costs nothing."""
        for module, names in self._names:
            if len(module._non_persistent_buffers_set) > len(names):
                for name in module._non_persistent_buffers_set - names:
                    delattr(module, name)
        with torch.no_grad():
            for place, (module, name, first) in enumerate(self._first):
                now = module._buffers.get(name)
                before, version = self._seen[place]
                if now is before and _version(now) == version:
                    continue
                if now is not None and first is not None and (now.shape, now.dtype) == (first.shape, first.dtype):
                    now.copy_(first)
                else:
                    module._buffers[name] = None if first is None else first.clone()
                self._seen[place] = self._mark(module, name)

    @staticmethod
    def _mark(module: torch.nn.Module, name: str) -> tuple[torch.Tensor | None, int]:
        tensor = module._buffers.get(name)
        return tensor, _version(tensor)


def _version(tensor: torch.Tensor | None) -> int:
    """Return the number of changes in place."""
    return -1 if tensor is None else tensor._version

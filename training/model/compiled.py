"""Models with compiled modules, whose tensors have their names without the compiler.

`torch.compile(module)` wraps the module, and puts `_orig_mod.` before the names of its tensors; `module.compile()` does
not. Versions, updates and checkpoints name tensors, so their names would depend on whether, and where, a site compiles.
"""

import sys
from typing import Any

from torch import nn


def in_place(model: nn.Module) -> nn.Module:
    """Return a model whose compiled modules are compiled in place: the same modules and results, other names.

    A wrapper with hooks stays, as its module would not call them.
    """
    if "torch._dynamo" not in sys.modules or not isinstance(model, nn.Module):
        return model
    for parent in [*model.modules()]:
        if not _is_wrapper(parent):
            for name, child in parent._modules.items():
                parent._modules[name] = _unwrapped(child)
    found: nn.Module = _unwrapped(model)
    return found


def _unwrapped(module: Any) -> Any:
    if not _is_wrapper(module):
        return module
    from torch._dynamo.external_utils import wrap_inline

    inner: Any = module._orig_mod
    inner._compiled_call_impl = module.dynamo_ctx(wrap_inline(inner._call_impl))  # torch skips calls of torch's modules
    return inner


def _is_wrapper(module: Any) -> bool:
    from torch._dynamo.eval_frame import OptimizedModule

    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return isinstance(module, OptimizedModule) and not any(vars(module).get(name) for name in hooks)

"""The test for a sharded tensor, without the import of `torch.distributed.tensor`, which takes a second.

No tensor is a DTensor before its class is imported.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Any) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)

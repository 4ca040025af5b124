"""The dtype in which each parameter of a sharded model is gathered: bfloat16 where autocast would cast it anyway.

So a sharded model computes in the dtypes of one process, whose inputs, activations and small parameters autocast leaves
unchanged: `fully_shard` itself would cast them all, and an integer that a float holds above 256 would change.
Gradients of one block are summed as one tensor, hence in one dtype.

A model that declares a sequence (`blueprint.sequence`) is a transformer, whose tables and norms are gathered in
bfloat16, too: what its layers hand on is then in bfloat16, half the memory and traffic. Its inputs stay unchanged.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from atoll.parallel.engine.records import records_of

NOT_CAST = (
    *(nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Bilinear),
    *(_NormBase, RNNBase, RNNCellBase),
)
"""Torch's modules whose operators autocast leaves in the dtype of their arguments, or that need one dtype in all."""


def gather_as_autocast(module: nn.Module) -> None:
    """Let each parameter of a module be gathered in its dtype if autocast does not cast it; after `fully_shard`.

    Matrices and larger ones are cast before they are gathered, half the bytes, but for those of `NOT_CAST`.
    """
    for record in records_of(module.modules()):
        record.__class__ = _Gathered


class _Gathered(FSDPParam):
    """Torch's record of a parameter, among others of its block that are gathered in another dtype."""

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        """Choose the dtypes of the gathered parameter and of its gradient's sum."""
        super().init_dtype_attrs(mp_policy)
        if not self._is_cast():
            self.param_dtype = None
        self.reduce_dtype = mp_policy.reduce_dtype

    def _is_cast(self) -> bool:
        holders = (self._module_info.module, *self._module_info.shared_modules)
        return self.sharded_param.dim() >= 2 and not any(isinstance(holder, NOT_CAST) for holder in holders)

    @property
    def unsharded_grad_data(self) -> torch.Tensor:
        """The gradient, in the dtype of its sum."""
        return self._summed(super().unsharded_grad_data)

    @property
    def unsharded_zero_grad_data(self) -> torch.Tensor:
        """Zeros in its place."""
        return self._summed(super().unsharded_zero_grad_data)

    def _summed(self, gradient: Any) -> torch.Tensor:
        tensor: torch.Tensor = gradient.to(self.reduce_dtype)
        return tensor

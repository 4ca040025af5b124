"""The flags `requires_grad` of a sharded model, which no forward pass may change.

`fully_shard` gives a parameter the flag of its shard at each gather, so a frozen layer would keep training.
"""

from typing import Any

from torch import nn

from atoll.parallel.engine.records import records_of
from atoll.task.errors import TaskBroken


def keep_flags(part: nn.Module) -> None:
    """Let a pass of a sharded part fail if it changes flags.

    Raises (the pass):
        TaskBroken: it has; with a parameter's name, before any gradient.
    """
    known: list[Any] = []

    def compare(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if not known:
            known.extend(records_of(part.modules()))
        for each in known:
            gathered = getattr(each, "_unsharded_param", each.sharded_param)  # it has been gathered, or not yet
            if gathered.requires_grad != each.sharded_param.requires_grad:
                raise TaskBroken(
                    f"{each._param_fqn}: the model's forward pass has set its requires_grad to "
                    f"{gathered.requires_grad}, which a sharded plan (plan.zero) cannot follow: set it in "
                    "task.model(), or train without zero and dp_shard"
                )

    part.register_forward_hook(compare)

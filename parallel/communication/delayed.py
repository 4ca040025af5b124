"""Delayed gradient averaging: nobody waits for a mean; it comes D steps later and replaces what was applied meanwhile.

Legend: u_i^t what the inner optimizer of replica i adds to its weights in step t, ū^t the replicas' mean of it.

    w_i <- w_i + u_i^t + (ū^{t-D} - u_i^{t-D})          for t < D only w_i + u_i^t

With plain SGD, u_i^t = -η g_i^t, this is the paper's w_i <- w_i - η (g_i^t - g_i^{t-D} + mean g^{t-D}). With momentum,
weight decay, a schedule or Adam the correction is made, as the paper has it, on the quantity that was applied: what
has been added is taken back, and the mean of what all have added takes its place. Each optimizer's state is its own.
So D = 0 is synchronous training for optimizers that are linear in the gradient (SGD, also with momentum); with Adam
it is the mean of the replicas' Adam steps.

    w_i - w_j = sum over the last D steps of (u_i - u_j)      at any time
    mean of w_i is never changed by a correction              so `flush` is the mean of the weights

The all-reduce of step t begins when the step ends and is awaited D steps later. Until then a step's update and the
buffer on its way are kept: 2 D + 1 copies of the local weights, with the one from before the step.

`correction=False` is the ablation w <- w + ū^{t-D}: the same for all replicas, but each step follows a gradient that
is D steps old.

Source: Zhu et al., "Delayed Gradient Averaging: Tolerate the Communication Latency for Federated Learning",
NeurIPS 2021.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from atoll.parallel.communication.means import Parameters, PendingMean, average, local_shards


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    own: list[torch.Tensor]
    mean: PendingMean


class DelayedAveraging:
    """See `outer.Outer`.

    Args:
        group: the replicas.
        delay: D >= 0, in steps.
        correction: whether a replica goes ahead with its own update until the mean is there.
    """

    def __init__(self, group: dist.ProcessGroup, *, delay: int, correction: bool = True) -> None:
        self._group, self._delay, self._correction = group, delay, correction
        self._before: list[torch.Tensor] = []
        self._ring: deque[_OnItsWay] = deque()

    def before_step(self, parameters: Parameters) -> None:
        """Remember the weights: what the step adds is seen from them."""
        self._before = [shard.clone() for shard in local_shards(parameters)]

    def after_step(self, parameters: Parameters, step: int) -> None:
        """Send what the step has added; apply the mean of D steps ago."""
        shards = local_shards(parameters)
        own = [shard - before for shard, before in zip(shards, self._before, strict=True)]
        self._ring.append(_OnItsWay(own, PendingMean(own, self._group)))
        if not self._correction:
            for shard, before in zip(shards, self._before, strict=True):
                shard.copy_(before)
        self._before = []
        if len(self._ring) > self._delay:
            self._apply(shards)

    def flush(self, parameters: Parameters) -> None:
        """Apply all that is on its way; the mean of the weights then takes away the last bit's rounding."""
        shards = local_shards(parameters)
        was_apart = bool(self._ring)
        while self._ring:
            self._apply(shards)
        if was_apart:
            average(shards, self._group)

    def state(self, parameters: Parameters) -> dict[str, torch.Tensor]:
        """Nothing: after `flush` nothing is on its way."""
        if self._ring:
            raise RuntimeError(f"the means of {len(self._ring)} steps are on their way: flush before saving")
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor], parameters: Parameters) -> None:
        """Begin with nothing on its way."""
        self.flush(parameters)

    def _apply(self, shards: list[torch.Tensor]) -> None:
        oldest = self._ring.popleft()
        for shard, own, mean in zip(shards, oldest.own, oldest.mean.wait(), strict=True):
            shard += mean - own if self._correction else mean

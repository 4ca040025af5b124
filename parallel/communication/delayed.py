"""Delayed gradient averaging: the mean of a step arrives D steps later and replaces the local update; no rank waits.

Legend: u_i^t the update of replica i's weights by its inner optimizer in step t, ū^t the replicas' mean of it.

    w_i <- w_i + u_i^t + (ū^{t-D} - u_i^{t-D})          for t < D only w_i + u_i^t

With plain SGD, u_i^t = -η g_i^t, this is the paper's w_i <- w_i - η (g_i^t - g_i^{t-D} + mean g^{t-D}). With momentum,
weight decay, a schedule or Adam the correction applies, as in the paper, to the quantity that was added: the replica's
update is subtracted, and the mean of all updates takes its place. Each optimizer has a separate state. So D = 0
is synchronous training for optimizers that are linear in the gradient (SGD, also with momentum); with Adam it is the
mean of the replicas' Adam steps.

    w_i - w_j = sum over the last D steps of (u_i - u_j)      at any time
    mean of w_i is never changed by a correction              so `flush` gives the mean of the weights

The all-reduce of step t begins when the step ends and is awaited D steps later. Until then a step's update and the
buffer of its all-reduce stay: 2 D + 1 copies of the local weights, with the one from before the step.

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

from atoll.ground.printable import count_of
from atoll.parallel.communication.means import Parameters, PendingMean, average, local_shards


@dataclass(frozen=True, slots=True)
class _Pending:
    update: list[torch.Tensor]
    mean: PendingMean


class DelayedAveraging:
    """Delayed gradient averaging; see `outer.Outer`.

    Args:
        group: the replicas.
        delay: D >= 0, in steps.
        correction: let a replica continue with its update until the mean arrives.
    """

    def __init__(self, group: dist.ProcessGroup, *, delay: int, correction: bool = True) -> None:
        self._group, self._delay, self._correction = group, delay, correction
        self._before: list[torch.Tensor] = []
        self._ring: deque[_Pending] = deque()

    def before_step(self, parameters: Parameters) -> None:
        """Save the weights, to compute the update of the step from them."""
        self._before = [shard.clone() for shard in local_shards(parameters)]

    def after_step(self, parameters: Parameters, step: int) -> None:
        """Send the update of the step; apply the mean of D steps ago."""
        shards = local_shards(parameters)
        update = [shard - before for shard, before in zip(shards, self._before, strict=True)]
        self._ring.append(_Pending(update, PendingMean(update, self._group)))
        if not self._correction:
            for shard, before in zip(shards, self._before, strict=True):
                shard.copy_(before)
        self._before = []
        if len(self._ring) > self._delay:
            self._apply(shards)

    def flush(self, parameters: Parameters) -> None:
        """Apply all pending means; the mean of the weights then removes the last differences of rounding."""
        shards = local_shards(parameters)
        had_pending = bool(self._ring)
        while self._ring:
            self._apply(shards)
        if had_pending:
            average(shards, self._group)

    def state(self, parameters: Parameters) -> dict[str, torch.Tensor]:
        """Return no tensors: after `flush` no mean is pending."""
        if self._ring:
            raise RuntimeError(
                f"the means of {count_of(len(self._ring), 'step is', 'steps are')} pending: flush before saving"
            )
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor], parameters: Parameters) -> None:
        """Begin without pending means."""
        self.flush(parameters)

    def _apply(self, shards: list[torch.Tensor]) -> None:
        oldest = self._ring.popleft()
        for shard, update, mean in zip(shards, oldest.update, oldest.mean.wait(), strict=True):
            shard += mean - update if self._correction else mean

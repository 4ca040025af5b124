"""DiLoCo: the replicas train alone for H steps; their total movement is the gradient of an outer Nesterov optimizer.

Legend: θ the weights at the last synchronization, θ_i those of replica i now, α and μ outer rate and momentum.

    Δ = mean over i of (θ - θ_i)            the pseudo-gradient: points uphill
    v <- μ v + Δ                            v = Δ at the first synchronization, as in torch.optim.SGD
    θ <- θ - α (Δ + μ v),   θ_i <- θ        μ = 0: θ - α Δ

The outer step is `torch.optim.SGD` on the copy θ. The inner optimizer's state (AdamW in the paper) stays local.
With α = 1 and μ = 0 this is local SGD; with H = 1 and plain SGD inside, too, synchronous data parallelism.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, Algorithm 1.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from atoll.parallel.communication.means import Parameters, PendingMean, like, local_shards

MOMENTUM = "momentum/"
"""The prefix of the outer momentum's names in a checkpoint."""


class DiLoCo:
    """The method DiLoCo; see `outer.Outer`.

    Args:
        group: the replicas.
        every: H >= 1.
        lr: α.
        momentum: μ.
        wire: dtype in which Δ is sent (float16 lost nothing in OpenDiLoCo, 2024); None: the parameters' dtype.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        wire: torch.dtype | None = None,
    ) -> None:
        self._group, self._every, self._wire = group, every, wire
        self._lr, self._momentum = lr, momentum
        self._anchors: list[torch.Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._are_apart = False

    def before_step(self, parameters: Parameters) -> None:
        """Save, before the very first step, the weights that all replicas begin with."""
        if self._optimizer is None:
            self._begin(parameters)

    def after_step(self, parameters: Parameters, step: int) -> None:
        """Take the outer step, if the inner one is the last of H."""
        self._are_apart = True
        if (step + 1) % self._every == 0:
            self.flush(parameters)

    def flush(self, parameters: Parameters) -> None:
        """Take the outer step early: on the movement since the last outer step, after fewer than H inner steps."""
        if not self._are_apart or self._optimizer is None:
            return
        shards = local_shards(parameters)
        moves = [anchor - shard for anchor, shard in zip(self._anchors, shards, strict=True)]
        for anchor, mean in zip(self._anchors, PendingMean(moves, self._group, self._wire).wait(), strict=True):
            anchor.grad = mean
        self._optimizer.step()
        self._optimizer.zero_grad()
        for anchor, shard in zip(self._anchors, shards, strict=True):
            shard.copy_(anchor)
        self._are_apart = False

    def state(self, parameters: Parameters) -> dict[str, torch.Tensor]:
        """Return the outer momentum v of each parameter; none before the first synchronization."""
        if self._are_apart:
            raise RuntimeError("the replicas differ: flush before saving")
        if self._optimizer is None:
            return {}
        buffers = [self._optimizer.state[anchor].get("momentum_buffer") for anchor in self._anchors]
        pairs = zip(parameters.items(), buffers, strict=True)
        return {MOMENTUM + name: like(parameter, buffer) for (name, parameter), buffer in pairs if buffer is not None}

    def load_state(self, state: Mapping[str, torch.Tensor], parameters: Parameters) -> None:
        """Restore the momentum; θ are the loaded parameters.

        Raises:
            ValueError: momentum of only some parameters, or of others.
        """
        names = [MOMENTUM + name for name in parameters]
        if state and set(state) != set(names):
            raise ValueError(f"outer momentum: not of these parameters: {sorted(set(state) ^ set(names))}")
        optimizer = self._begin(parameters)
        if state:
            buffers = local_shards({name: state[name] for name in names})
            for anchor, buffer in zip(self._anchors, buffers, strict=True):
                optimizer.state[anchor]["momentum_buffer"] = buffer.clone()
        self._are_apart = False

    def _begin(self, parameters: Parameters) -> torch.optim.Optimizer:
        self._anchors = [shard.clone() for shard in local_shards(parameters)]
        nesterov = self._momentum > 0
        self._optimizer = torch.optim.SGD(self._anchors, lr=self._lr, momentum=self._momentum, nesterov=nesterov)
        return self._optimizer

"""The conventions of the literature: bytes of model state and activations, and ZeRO's reductions.

Legend: P parameters, N ranks that share the data, h hidden, b micro-batch, s sequence, L layers.

    zero-paper    2 P parameters + 2 P gradients + 12 P optimizer (fp32 copy, momentum, variance) = 16 P
    lecture       4 P parameters + 4 P gradients + 12 P optimizer (a master copy also in fp32)    = 20 P
    activations   12 h b s L elements of 2 bytes, in both

    ZeRO-1   optimizer / N       2 P + 2 P + 12 P / N      4 times less    1.0 times the traffic
    ZeRO-2   and gradients / N   2 P + 14 P / N            8 times less    1.0
    ZeRO-3   and parameters / N  16 P / N                  N times less    1.5

The lecture's GPT-2 (1.5 B, fp32, b = 32, s = 1024) is 6 + 6 + 18 GB and 56.25 GiB of activations; its slide writes
56.43 and a total of 87, for which it adds decimal gigabytes and binary ones.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 3,
figure 1 and footnote 3, and section 7 (traffic).
"""

from dataclasses import dataclass

from atoll.parallel.planner.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Accounting:
    """Bytes for each parameter under one convention."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The bytes of parameters, gradients and optimizer together, for each parameter."""
        return self.parameters + self.gradients + self.optimizer


ACCOUNTINGS = {"lecture": Accounting(4, 4, 12), "zero-paper": Accounting(2, 2, 12)}
"""The conventions by name. The engine's real memory follows none of them: see `memory`."""

TRAFFIC = {0: 2, 1: 2, 2: 2, 3: 3}
"""The traffic of one step by ZeRO stage, in sizes of the model: an all-reduce counts twice, once for each of its
halves."""


def states(parameters: float, accounting: Accounting, *, zero: int = 0, num_ranks: int = 1) -> tuple[float, ...]:
    """Return the bytes of parameters, gradients and optimizer on one rank."""
    sizes = (accounting.parameters, accounting.gradients, accounting.optimizer)
    sharded_from = (3, 2, 1)
    return tuple(
        parameters * size / (num_ranks if zero >= stage else 1) for size, stage in zip(sizes, sharded_from, strict=True)
    )


def activations(model: ModelShape, microbatch: int) -> int:
    """Return the bytes of the activations of one micro-batch: 12 h b s L elements of two bytes."""
    return 2 * 12 * model.hidden * microbatch * model.sequence * model.layers

"""The use of a mesh in one training, as its site reports it: memory of the fullest rank, and speed. Pure values.

    MFU = operations of the model per second / peak of the devices of all ranks

for the training's last attempt, without recomputed operations (Chowdhery et al., "PaLM", 2022, appendix B).
"""

import math
from dataclasses import dataclass
from typing import Any

from atoll.ground.printable import count_of, printable_size

BYTES_MAX, RATE_MAX, RANKS_MAX = 2**50, 1e30, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshUse:
    """The use of a mesh of ranks; 0: not known."""

    num_ranks: int
    peak_bytes: int = 0
    """Largest memory of a rank [bytes]: of a GPU as allocated, of a process without mapped files."""
    steps_per_s: float = 0.0
    flops_per_s: float = 0.0
    """Operations of the model, forward and backward, on all ranks together [FLOP/s]."""
    peak_flops: float = 0.0
    """Peak of the devices of all ranks together [FLOP/s]."""

    @classmethod
    def read(
        cls, num_ranks: int, peak_bytes: int, steps_per_s: float, flops_per_s: float, peak_flops: float
    ) -> "MeshUse | None":
        """Read the use that a message states; out-of-range numbers become unknown, a mesh without ranks None."""
        if not 1 <= num_ranks <= RANKS_MAX:
            return None
        steps_per_s, flops_per_s, peak_flops = (
            rate if math.isfinite(rate) and 0 <= rate <= RATE_MAX else 0.0
            for rate in (steps_per_s, flops_per_s, peak_flops)
        )
        return cls(
            num_ranks=num_ranks,
            peak_bytes=peak_bytes if peak_bytes <= BYTES_MAX else 0,
            steps_per_s=steps_per_s,
            flops_per_s=flops_per_s,
            peak_flops=peak_flops,
        )

    @property
    def mfu(self) -> float | None:
        """Utilization of the devices; None: not known (`why_no_mfu`)."""
        return self.flops_per_s / self.peak_flops if self.flops_per_s and self.peak_flops else None

    @property
    def why_no_mfu(self) -> str:
        """Reason why the utilization is unknown; empty: it is known."""
        if not self.flops_per_s:
            return "the operations of the model are not known: it does not run without memory"
        return "" if self.peak_flops else "the peak of these devices is not known"

    def __str__(self) -> str:
        said = f"{count_of(self.num_ranks, 'rank')}, {self.steps_per_s:.3g} steps/s"
        said += f", at most {printable_size(self.peak_bytes)} of memory on a rank" if self.peak_bytes else ""
        if self.mfu is not None:
            return f"{said}, MFU {self.mfu:.1%}"
        return f"{said}, {self.flops_per_s / 1e9:.3g} GFLOP/s" if self.flops_per_s else said

    @property
    def document(self) -> dict[str, Any]:
        """Values for a script; `mfu` is None if it is unknown, with the reason."""
        return {
            "num_ranks": self.num_ranks,
            "peak_bytes": self.peak_bytes or None,
            "steps_per_s": self.steps_per_s,
            "flops_per_s": self.flops_per_s or None,
            "peak_flops": self.peak_flops or None,
            "mfu": self.mfu,
            "why_no_mfu": self.why_no_mfu,
        }

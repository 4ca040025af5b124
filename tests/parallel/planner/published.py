"""Published training runs whose settings are known, beside the planner's prediction of the same plan.

`python -m tests.parallel.planner.published` prints the table. FITTED are the runs of `planner-runs`, HELD_OUT others of
the same pages. Tokens per second are of one device. Sources: llm-foundry, scripts/train/benchmarking/README.md (MPT);
fms-fsdp, README.md (Llama 2); Megatron-LM, README.md (GPT-3, read as an MFU).
"""

import sys
from dataclasses import dataclass, replace
from typing import Literal

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.cluster import CLUSTERS, Cluster
from atoll.parallel.planner.prediction import Prediction, predict
from atoll.parallel.planner.shape import ModelShape


def _mpt(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=50368,
        tied=True,
        mlp="gelu",
        norm="layernorm",
        positions=True,
    )


def _llama(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int | None = None) -> ModelShape:
    return ModelShape(layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, vocab=32000)


MODELS = {
    "mpt-125m": _mpt(12, 768, 12),
    "mpt-350m": _mpt(24, 1024, 16),
    "mpt-760m": _mpt(24, 1536, 12),
    "mpt-1b": _mpt(24, 2048, 16),
    "mpt-3b": _mpt(32, 2560, 20),
    "mpt-7b": _mpt(32, 4096, 32),
    "mpt-13b": _mpt(40, 5120, 40),
    "mpt-30b": _mpt(48, 7168, 56),
    "mpt-70b": _mpt(80, 8192, 64),
    "llama2-7b": _llama(32, 4096, 11008, 32),
    "llama2-13b": _llama(40, 5120, 13824, 40),
    "llama2-34b": _llama(48, 8192, 22016, 64, 8),
    "llama2-70b": _llama(80, 8192, 28672, 64, 8),
    "gpt3-131k": ModelShape(
        layers=96, hidden=12288, heads=96, vocab=131072, mlp="gelu", norm="layernorm", biases=True, positions=True
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A published run."""

    model: str
    kind: str
    """Preset of the cluster."""
    sequence: int
    devices: int
    microbatch: int
    accumulate: int
    recompute: Literal["none", "selective", "full"]
    tokens_per_s: float
    """Of one device."""
    replicas: int = 1
    """Groups of devices that each shard the whole model (HSDP)."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"

    @property
    def cluster(self) -> Cluster:
        """The machines."""
        return replace(CLUSTERS[self.kind], nodes=self.devices // 8)

    @property
    def shape(self) -> ModelShape:
        """The model with the run's sequences."""
        return replace(MODELS[self.model], sequence=self.sequence)

    @property
    def candidate(self) -> Candidate:
        """The plan of the run."""
        mesh = Mesh(dp_replicate=self.replicas, dp_shard=self.devices // self.replicas)
        plan = Plan(
            mesh=mesh,
            zero=3,
            precision="bf16",
            accumulate=self.accumulate,
            recompute=self.recompute,
            reduce_dtype=self.reduce_dtype,
        )
        return Candidate(plan=plan, microbatch=self.microbatch)

    def predicted(self) -> Prediction:
        """Return what the planner says of it."""
        return predict(self.shape, self.candidate, self.cluster)

    @property
    def off(self) -> float:
        """Predicted over published tokens per second, less one."""
        return self.predicted().tokens_per_s / self.devices / self.tokens_per_s - 1


FITTED = (
    Run("mpt-1b", "h100-80", 2048, 8, 14, 1, "none", 45455),
    Run("mpt-7b", "h100-80", 2048, 8, 6, 1, "none", 10643),
    Run("mpt-13b", "h100-80", 2048, 8, 2, 1, "none", 4792),
    Run("llama2-7b", "a100-80", 4096, 128, 2, 1, "none", 3760, replicas=16, reduce_dtype="bf16"),
    Run("llama2-70b", "a100-80", 4096, 128, 6, 1, "full", 380, reduce_dtype="bf16"),
)

GPT3_MFU = 0.47
"""Of GPT-3 with a vocabulary of 131,072 in batches of 1,152 sequences of 4,096 on 96 H100."""

HELD_OUT = (
    Run("mpt-70b", "h100-80", 2048, 64, 8, 4, "full", 1039),
    Run("mpt-70b", "h100-80", 2048, 32, 2, 16, "full", 882),
    Run("mpt-30b", "h100-80", 4096, 8, 1, 21, "full", 1802),
    Run("mpt-30b", "h100-80", 2048, 32, 14, 3, "full", 2308),
    Run("mpt-30b", "h100-80", 2048, 8, 3, 21, "full", 2002),
    Run("mpt-13b", "h100-80", 4096, 8, 10, 3, "full", 4717),
    Run("mpt-13b", "h100-80", 2048, 64, 2, 1, "none", 4800),
    Run("mpt-7b", "h100-80", 8192, 8, 8, 2, "full", 6935),
    Run("mpt-7b", "h100-80", 1024, 8, 64, 2, "full", 10203),
    Run("mpt-3b", "h100-80", 8192, 8, 3, 6, "none", 16578),
    Run("mpt-3b", "h100-80", 2048, 64, 6, 3, "none", 22525),
    Run("mpt-3b", "h100-80", 512, 8, 40, 6, "none", 27965),
    Run("mpt-1b", "h100-80", 4096, 8, 7, 4, "none", 38535),
    Run("mpt-1b", "h100-80", 2048, 64, 20, 1, "none", 44402),
    Run("mpt-760m", "h100-80", 2048, 16, 24, 1, "none", 68551),
    Run("mpt-70b", "a100-80", 2048, 64, 8, 4, "full", 410, reduce_dtype="bf16"),
    Run("mpt-70b", "a100-80", 2048, 32, 2, 16, "full", 373, reduce_dtype="bf16"),
    Run("mpt-30b", "a100-80", 2048, 8, 3, 21, "full", 916),
    Run("mpt-13b", "a100-80", 8192, 8, 5, 3, "full", 1795),
    Run("mpt-13b", "a100-80", 2048, 8, 2, 3, "none", 2262),
    Run("mpt-7b", "a100-80", 4096, 8, 16, 2, "full", 3684),
    Run("mpt-7b", "a100-80", 2048, 8, 6, 2, "none", 4641),
    Run("mpt-3b", "a100-80", 2048, 8, 10, 2, "none", 10811),
    Run("mpt-1b", "a100-80", 2048, 8, 14, 4, "none", 20513),
    Run("mpt-760m", "a100-80", 4096, 8, 12, 2, "none", 27351),
    Run("mpt-350m", "a100-80", 2048, 8, 32, 2, "none", 58782),
    Run("mpt-125m", "a100-80", 2048, 8, 32, 2, "none", 141737),
    Run("llama2-13b", "a100-80", 4096, 128, 1, 1, "none", 1700, replicas=16, reduce_dtype="bf16"),
    Run("llama2-34b", "a100-80", 4096, 128, 8, 1, "full", 772, reduce_dtype="bf16"),
)


def main() -> None:
    """Print each run, what was measured and what is predicted, and the memory."""
    for run in (*FITTED, *HELD_OUT):
        found = run.predicted()
        sys.stdout.write(
            f"{run.model:11s} {run.kind:9s} s={run.sequence:5d} {run.devices:4d} devices "
            f"{run.accumulate:2d} x {run.microbatch:3d} {run.recompute:5s} {run.tokens_per_s:8,.0f} tokens/s, "
            f"predicted {found.tokens_per_s / run.devices:8,.0f} ({run.off:+.1%}), MFU {found.mfu:.1%}, "
            f"{found.memory.total / 1e9:5.1f} of {run.cluster.room / 1e9:.1f} GB\n"
        )


if __name__ == "__main__":
    main()

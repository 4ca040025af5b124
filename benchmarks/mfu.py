"""The share of a GPU's bf16 peak that the engine reaches with a model of a billion parameters.

    python -m benchmarks.mfu [--turns N] [--only NAME ..] [--device cuda|cpu] [--scale S]

Two decoders in bf16 with float32 master weights under `fully_shard` at one rank, with fused AdamW, eager and with
compiled blocks: one of GPT-2's largest size (1.5 B) and one of the size of Llama 3.2 (1 B). The share is 6 N_matmul +
12 L h s FLOP per token, without a discount for the causal mask, over the peak of the device's data sheet. The peak of
the allocator stands beside the memory that `atoll plan` predicts. `--scale` divides widths and depths for a trial
without a GPU, which has no peak and no bar.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from atoll.parallel.data.batch import Batch
from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.models.decoder import Decoder, DecoderConfig
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.memory import memory
from atoll.parallel.planner.shape import ModelShape
from atoll.parallel.trainer.flops import peak_flops
from atoll.parallel.world import World, process_group
from atoll.training.optimizers.make import make_optimizer
from atoll.training.optimizers.options import OptimizerConfig
from benchmarks.report import Bar, conclude, say

MODELS = {
    "gpt2-xl": (DecoderConfig(vocab=50_304, dim=1600, layers=48, heads=25, ffn=4288, sequence=1024), 14),
    "llama-1b": (
        DecoderConfig(vocab=32_000, dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, sequence=2048),
        4,
    ),
}
"""The decoder, and the number of sequences in a step."""

STEPS = 4
"""Steps of a turn, after each of which the processor waits for the GPU, as the trainer does when it logs."""

BARS = {False: 0.33, True: 0.40}
"""The bars, by whether blocks are compiled."""


def flops_per_token(model: Decoder, config: DecoderConfig) -> float:
    """Return 6 N_matmul + 12 L h s; the embedding is looked up, not multiplied."""
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) - config.vocab * config.dim
    return 6.0 * matrices + 12.0 * config.layers * config.dim * config.sequence


def planned_gib(config: DecoderConfig, sequences: int, plan: Plan) -> float:
    """Return the memory that the planner predicts [GiB]."""
    shape = ModelShape(
        layers=config.layers,
        hidden=config.dim,
        heads=config.heads,
        kv_heads=config.kv_heads,
        ffn=config.hidden,
        vocab=config.vocab,
        sequence=config.sequence,
    )
    return memory(shape, Candidate(plan=plan, microbatch=sequences)).total / 2**30


def measured(
    config: DecoderConfig, sequences: int, device: torch.device, *, compile: bool, turns: int
) -> dict[str, Any]:
    """Return tokens per second, FLOP/s and peak memory of one configuration."""
    if device.type == "cuda":
        gc.collect()  # the engine before this one, whose hooks are cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with device:
        model = Decoder(config)
    flops = flops_per_token(model, config)
    parameters = sum(p.numel() for p in model.parameters())
    plan = Plan(zero=3, precision="bf16", compile=compile)
    engine = assemble(
        model,
        plan,
        Optimization(
            loss=lambda outputs, targets: nn.functional.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten()),
            make_optimizer=lambda named: make_optimizer(OptimizerConfig(name="adamw", lr=1e-4), named),
        ),
        axes=Axes(plan.mesh, device.type),
        device=device,
    )
    tokens = torch.randint(0, config.vocab, (sequences, config.sequence + 1), device=device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), sequences * config.sequence)
    times = []
    for turn in range(turns + 1):
        _wait(device)
        began = time.perf_counter()
        for _ in range(STEPS):
            engine.step(batch, total=batch.count, report=False)
        _wait(device)
        if turn > 0:
            times.append((time.perf_counter() - began) / STEPS)
    rate = batch.count / median(times)
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "parameters": parameters,
        "tokens_per_s": rate,
        "flops": rate * flops,
        "memory_gib": peak_gib,
        "planned_gib": planned_gib(config, sequences, plan),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def scaled(config: DecoderConfig, by: int) -> DecoderConfig:
    """Return a decoder of the same form with 1/by of the layers, the vocabulary and the features of a head."""
    return replace(
        config,
        dim=config.dim // by // (2 * config.heads) * 2 * config.heads or 2 * config.heads,
        layers=max(1, config.layers // by),
        vocab=config.vocab // by,
        ffn=config.hidden // by,
        sequence=config.sequence // by,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        return conclude("mfu", [], ours="not measured: there is no GPU", theirs=None, why_not="there is no GPU")
    device = World().device(given.device)
    peak = peak_flops(device, "bf16")
    bars, figures = [], {}
    with process_group(World(), given.device):
        for name in given.only:
            config, sequences = MODELS[name]
            for compile in (False, True) if given.device == "cuda" else (False,):
                found = measured(scaled(config, given.scale), sequences, device, compile=compile, turns=given.turns)
                figures[f"{name}, {'compiled' if compile else 'eager'}"] = found
                share = None if peak is None else found["flops"] / peak
                shown = f"{share:.1%} of the peak" if share is not None else "the peak is not known"
                say(f"{name} {'compiled' if compile else 'eager'}: {found['tokens_per_s']:,.0f} tokens/s, {shown}")
                if found["memory_gib"] is not None:
                    say(f"  memory {found['memory_gib']:.2f} GiB, planned {found['planned_gib']:.2f} GiB")
                if share is not None and given.scale == 1:
                    bars.append(Bar.at_least(f"{name}, {'compiled' if compile else 'eager'}", share, BARS[compile]))
                torch._dynamo.reset()
    ours = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "scale": given.scale} | figures
    return conclude("mfu", bars, ours=ours, theirs=None, why_not="the bar is relative to the peak of the data sheet")


if __name__ == "__main__":
    raise SystemExit(main())

"""Dry runs: one rank of any mesh in one process, with the engine's build and step, without memory and network.

The process group is torch's fake one, in which a collective returns at once; the model is built on `meta` and made of
fake tensors, which have shapes and no data. So any rank of 64, with a model of 8 B, fits a laptop, and the counts are
the engine's real step's: every collective, the bytes of the rank's shards, the tensors alive at each moment.
"""

import multiprocessing
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.nn import functional

from atoll.parallel.data.batch import Batch
from atoll.parallel.engine import pipeline, repetition
from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.forked import FROZEN, PRELOAD, RankFailed
from atoll.parallel.engine.mesh import AXES
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.orphans import end_with_the_parent
from atoll.parallel.engine.step import Engine
from atoll.parallel.models.decoder import Decoder, DecoderConfig
from atoll.parallel.planner.candidate import Candidate, coordinates
from atoll.parallel.planner.counting import Collective, Watch
from atoll.parallel.planner.shape import ModelShape, as_decoder
from atoll.training.optimizers.norms import local


@dataclass(frozen=True, slots=True)
class DryRun:
    """The measurements of one step of one rank."""

    rank: int
    parameters: int
    """Bytes of the rank's shards."""
    gradients: int
    """Bytes of the gradients of the rank's shards, after the step."""
    optimizer: int
    """Bytes of the optimizers' state."""
    peak: int
    """Bytes alive at the worst moment of a step that is not the first."""
    collectives: tuple[Collective, ...]
    """The collectives of that step, in order."""
    flops: float
    """Floating-point operations of that step, of products and attention."""

    def counted(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return calls and bytes by (axis, kind)."""
        calls: Counter[tuple[str, str]] = Counter()
        num_bytes: Counter[tuple[str, str]] = Counter()
        for call in self.collectives:
            calls[call.axis, call.kind] += 1
            num_bytes[call.axis, call.kind] += call.num_bytes
        return {key: (calls[key], num_bytes[key]) for key in calls}

    def hidden(self) -> dict[tuple[str, str], tuple[int, int, float]]:
        """Return by (axis, kind) the calls, how many some computation can hide, and its mean share of the step."""
        found: dict[tuple[str, str], list[float]] = {}
        for call in self.collectives:
            share = call.window(self.flops) / self.flops if self.flops else 0.0
            found.setdefault((call.axis, call.kind), []).append(share)
        return {
            key: (len(all_), sum(share > 0 for share in all_), sum(all_) / len(all_)) for key, all_ in found.items()
        }


def decoder_config(shape: ModelShape) -> DecoderConfig:
    """Return the engine's decoder configuration for a model shape.

    Raises:
        ValueError: the shape is no Llama-style decoder.
    """
    if as_decoder(shape) != shape:
        raise ValueError("a dry run builds the Llama-style decoder: mlp=swiglu, norm=rmsnorm, no biases, no positions")
    return DecoderConfig(
        vocab=shape.vocab,
        dim=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn=shape.width,
        sequence=shape.sequence,
        tied=shape.tied,
    )


def dry_run(shape: ModelShape, candidate: Candidate, rank: int = 0) -> DryRun:
    """Run two steps of one rank in this process, which must have no process group; the second one is counted.

    Raises:
        ValueError: the engine refuses the plan, or it cannot run on fake tensors (DDP's buckets).
    """
    if candidate.plan.is_ddp:
        raise ValueError("DDP's reducer does not run on fake tensors: see dp_replicate with zero, which has its bytes")
    dist.init_process_group("fake", rank=rank, world_size=candidate.mesh.size)
    try:
        with patch.object(repetition, "is_due", _never_due):  # an examined pass recomputes all, and has no values
            return _dry_run(shape, candidate, rank)
    finally:
        dist.destroy_process_group()


def _dry_run(shape: ModelShape, candidate: Candidate, rank: int) -> DryRun:
    axes = Axes(candidate.mesh, "cpu")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # wrapped models are built on `meta`: the wrappers create meshes, whose tensors must not be fake
    is_plain = candidate.mesh.tp == 1 and not candidate.plan.is_sharded
    with fake if is_plain else torch.device("meta"):
        model = _Unmoved(decoder_config(shape))
    engine = _build(model, shape, candidate, axes)
    with fake:
        for part in engine.parts if not is_plain else []:
            part.to_empty(device="cpu")
        batch = _batch(shape, candidate)
        engine.step(batch, total=1, report=False)  # the first step creates the optimizer's state
        watch = Watch(partial(_axis_of, candidate))
        for tensors in _states(engine).values():
            for tensor in tensors:
                watch.hold(tensor)
        with watch:
            engine.step(batch, total=1, report=False)
        states = _states(engine)
    sizes = {name: sum(tensor.numel() * tensor.element_size() for tensor in found) for name, found in states.items()}
    return DryRun(rank=rank, **sizes, peak=watch.peak, collectives=tuple(watch.collectives), flops=watch.flops)


def _never_due(_number: int) -> bool:
    return False


class _Unmoved(Decoder):
    """A decoder that is not moved between devices: moving would turn fake tensors into others."""

    def to(self, *_args: Any, **_options: Any) -> "_Unmoved":
        """Return the unchanged model."""
        return self


def _build(model: nn.Module, shape: ModelShape, candidate: Candidate, axes: Axes, device: str = "cpu") -> Engine:
    """Return the engine, with a pipeline that neither exchanges shapes with its neighbours nor reads fake values."""
    optimization = Optimization(loss=_loss, make_optimizer=OPTIMIZERS[candidate.optimizer])
    with patch.object(pipeline, "Stage", _stage_kind(shape, candidate)):
        engine = assemble(model, candidate.plan, optimization, axes=axes, device=device)
    if isinstance(engine._executor, pipeline.Pipeline):
        targets = torch.zeros(candidate.microbatch, shape.sequence, device=device)
        engine._executor._weighted_loss = lambda outputs, number: _loss(outputs, targets)  # type: ignore[method-assign]
    return engine


def _axis_of(candidate: Candidate, group: str) -> str:
    """Return the axis on which the ranks of a process group differ."""
    ranks = dist.get_process_group_ranks(_resolve_process_group(group))  # type: ignore[arg-type]
    places = [coordinates(candidate.mesh, rank) for rank in ranks]
    return "+".join(axis for axis in AXES if len({place[axis] for place in places}) > 1)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    "momentum": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
    "adam": lambda named: torch.optim.Adam([p for _, p in named], lr=1e-3),
    "adamw": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
}


def _batch(shape: ModelShape, candidate: Candidate) -> Batch:
    rows = candidate.microbatch * candidate.plan.microbatches
    tokens = torch.zeros(rows, shape.sequence, dtype=torch.long)
    return Batch(tokens, torch.zeros(rows, shape.sequence), rows)


def _states(engine: Engine) -> dict[str, list[torch.Tensor]]:
    parameters = [parameter for part in engine.parts for parameter in part.parameters()]
    return {
        "parameters": [local(parameter) for parameter in parameters],
        "gradients": [local(p.grad) for p in parameters if p.grad is not None],
        "optimizer": [
            local(value)
            for optimizer in engine.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ],
    }


def _loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in float32. The targets are floats: no code reads fake values to count them."""
    return functional.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten().long())


def _stage_kind(shape: ModelShape, candidate: Candidate) -> type[pipeline.Stage]:
    """Return a stage class that knows the shapes which other stages would send."""
    dtype = torch.bfloat16 if candidate.plan.precision == "bf16" else torch.float32
    rows, length = candidate.microbatch, shape.sequence // candidate.cut_tokens
    tokens = torch.zeros(rows, shape.sequence, dtype=torch.long, device="meta")
    between = torch.zeros(rows, length, shape.hidden, dtype=dtype, device="meta", requires_grad=True)
    logits = torch.zeros(rows, shape.sequence, shape.vocab, dtype=dtype, device="meta", requires_grad=True)

    class DryStage(pipeline.Stage):
        def __init__(self, part: nn.Module, index: int, num_stages: int, device: torch.device, **options: Any) -> None:
            given = tokens if index == 0 else between
            returned = logits if index == num_stages - 1 else between
            super().__init__(part, index, num_stages, device, input_args=given, output_args=returned, **options)
            if index < num_stages - 1:  # a norm under tp gives a DTensor, whose shard is what is sent
                part.register_forward_hook(lambda _part, _inputs, outputs: local(outputs))

        def _warmup_forward_vote(self, *_args: Any, **_options: Any) -> torch.Tensor:
            return torch.tensor([1])

        def _warmup_backward_result(self, *_args: Any, **_options: Any) -> torch.Tensor:
            return torch.tensor([1])

    return DryStage


def apart(shape: ModelShape, candidate: Candidate, rank: int = 0, *, timeout_s: float = 600.0) -> DryRun:
    """Run `dry_run` in a separate process, which isolates torch's process groups and caches.

    Raises:
        ValueError: the engine refuses the plan.
        RankFailed: anything else failed; the message has the traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "torch._subclasses.fake_tensor", "torch.utils.flop_counter", FROZEN])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, shape, candidate, rank), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise RankFailed(f"the dry run of rank {rank} did not end within {timeout_s} s")
        result = receiver.recv()
    except EOFError:
        process.join()
        raise RankFailed(f"the dry run of rank {rank} died with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(result, DryRun):
        return result
    raise result if isinstance(result, ValueError) else RankFailed(result)


def _answer(sender: Connection, shape: ModelShape, candidate: Candidate, rank: int) -> None:
    end_with_the_parent()  # a signal may have ended it while it started this process
    try:
        sender.send(dry_run(shape, candidate, rank))
    except ValueError as error:
        sender.send(error)
    except BaseException:  # any error is reported to the caller
        sender.send(traceback.format_exc())

"""Every strategy as a case: a model, a plan, the ranks that it needs, and how near it must come to the plain loop."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from atoll.parallel.data.batch import Batch, count_units
from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blueprint import Blueprint
from atoll.parallel.engine.buffers import average_buffers
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import whole
from atoll.parallel.models.decoder import Decoder, DecoderConfig
from tests.parallel.engine import odd_models, reference
from tests.parallel.engine.reference import Trace
from tests.parallel.models.cnn import CNN
from tests.parallel.models.mlp import MLP
from tests.parallel.ranks import call_on_ranks

VOCAB, SEQUENCE = 64, 16


def decoder(
    layers: int = 8,
    *,
    tied: bool = False,
    heads: int = 8,
    kv_heads: int | None = None,
    kind: type[Decoder] = Decoder,
) -> nn.Module:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab=VOCAB, dim=32, layers=layers, heads=heads, kv_heads=kv_heads, ffn=64, sequence=SEQUENCE, tied=tied
    )
    return kind(config)


def small() -> nn.Module:
    return decoder(2)


def tied() -> nn.Module:
    return decoder(2, tied=True)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return MLP([64, 48, 32, 40, 10])


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return CNN([1, 4, 8], 8, hidden=16, norm=False)


def cnn_with_norms() -> nn.Module:
    torch.manual_seed(0)
    return CNN([1, 4, 8], 8, hidden=16)


def own_sequential() -> nn.Module:
    """Return a user's model without any blueprint."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 10))


def repeating() -> nn.Module:
    """The same objects in several places: an activation, a layer, a container."""
    torch.manual_seed(0)
    tanh, layer = nn.Tanh(), nn.Linear(24, 24)
    block = nn.Sequential(nn.Linear(24, 24), tanh)
    block[0].spare = nn.Linear(24, 24)  # no pass calls it, so no step moves it, also by its weight decay
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), tanh, layer, block, layer, block, tanh, nn.Linear(24, 10))


class OwnModule(nn.Module):
    """A user's own module, without a blueprint."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 24)
        self.middle = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.leave = nn.Linear(24, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.enter(images.flatten(1))
        for layer in self.middle:
            x = x + layer(x).tanh()
        logits: torch.Tensor = self.leave(x)
        return logits


def tied_blocks() -> nn.Module:
    """Two blocks share a weight."""
    model = own_module()
    assert isinstance(model, OwnModule)
    model.middle[2].weight = model.middle[0].weight
    return model


def frozen() -> nn.Module:
    model = small()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and "embed" not in name)
    return model


class Apart(Decoder):
    """A decoder that is cut before its head, whose pieces cost otherwise."""

    weights: ClassVar[Mapping[str, float]] = {"head": 9, "norm": 0.1}

    @property
    def blueprint(self) -> Blueprint:
        """The same but for the costs."""
        return replace(super().blueprint, weights=self.weights)


class ApartWithNorm(Apart):
    """The same, cut before its last norm."""

    weights: ClassVar[Mapping[str, float]] = {"head": 1, "norm": 3}


def before_head() -> nn.Module:
    return decoder(2, kind=Apart)


def before_norm() -> nn.Module:
    return decoder(2, kind=ApartWithNorm)


def in_place() -> nn.Module:
    """Blocks that change the result of a product in place."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True)) for _ in range(2)]
    return InPlace(blocks)


class Gated(nn.Module):
    """A recurrent layer, which writes into views of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x.unflatten(1, (4, 16)))[0]
        return found.flatten(1)


def gated() -> nn.Module:
    torch.manual_seed(0)
    return InPlace([Gated(), Gated()])


class Turned(nn.Module):
    """A linear layer whose outputs lie in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(images.flatten(1).double())).t().contiguous().t()


def turned() -> nn.Module:
    """A model in float64 whose stages hand on tensors that are not contiguous."""
    torch.manual_seed(0)
    return nn.Sequential(Turned(), Turned(), Turned(), nn.Linear(64, 10)).double()


class Viewed(nn.Module):
    """A linear layer whose outputs are a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(images.flatten(1))).unflatten(1, (8, 8))


def viewed() -> nn.Module:
    """A model whose stages hand on views."""
    torch.manual_seed(0)
    return nn.Sequential(*(Viewed() for _ in range(4)), nn.Flatten(), nn.Linear(64, 10))


class InPlace(nn.Module):
    """A list of blocks and a head."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.leave = nn.ModuleList(blocks), nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.flatten(1)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.leave(x)
        return logits


def own_module() -> nn.Module:
    torch.manual_seed(0)
    return OwnModule()


@dataclass(frozen=True)
class Case:
    """One strategy on one model."""

    name: str
    plan: Plan
    model: Callable[[], nn.Module] = small
    optimizer: str = "sgd"
    last: int = reference.BATCH
    ignored: bool = False
    clip_norm: float | None = None
    loss_tolerance: float = 5e-6
    norm_tolerance: float = 1e-6
    parameter_tolerance: float = 1e-6

    @property
    def ranks(self) -> int:
        return self.plan.mesh.size

    def batches(self) -> list[tuple[Any, Any]]:
        if isinstance(self.model(), Decoder):
            return reference.token_batches(VOCAB, SEQUENCE, last=self.last, ignored=self.ignored)
        return reference.image_batches(last=self.last)

    def loss(self) -> Callable[[Any, Any], torch.Tensor]:
        return reference.token_loss if isinstance(self.model(), Decoder) else nn.functional.cross_entropy


def train(case: Case, device: str = "cpu") -> Trace:
    """The case on this rank; every rank returns the losses, norms and parameters that it has."""
    plan = case.plan
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # or the mesh would take the GPU of the rank's number
    axes = Axes(plan.mesh, torch.device(device).type) if plan.mesh.size > 1 or plan.is_sharded else None
    engine = assemble(
        case.model(),
        plan,
        Optimization(
            loss=case.loss(),
            make_optimizer=lambda named: reference.make_optimizer(case.optimizer, named),
            clip_norm=case.clip_norm,
        ),
        axes=axes,
        device=device,
    )
    losses, norms = [], []
    for inputs, targets in case.batches():
        measured = engine.step(mine(inputs, targets, axes).to(device))
        assert measured.grad_norm is not None
        losses.append(measured.loss.item())
        norms.append(measured.grad_norm.item())
    average_buffers(engine.parts, axes)
    inner = [getattr(part, "module", part) for part in engine.parts]
    parameters = {
        name: whole(p.detach()).clone().cpu()
        for part in inner
        for name, p in part.named_parameters(remove_duplicate=False)
    }
    buffers = {name: whole(b).clone().cpu() for part in inner for name, b in part.named_buffers()}
    return Trace(losses, norms, parameters, buffers)


def mine(inputs: torch.Tensor, targets: torch.Tensor, axes: Axes | None) -> Batch:
    """The rows of this rank; where there are none, any row with the weight zero."""
    if axes is None:
        return Batch(inputs, targets, count_units(targets))
    rows = torch.arange(len(inputs)).tensor_split(axes.mesh.dp)[axes.dp_rank]
    if len(rows) == 0:
        return Batch(inputs[:1], targets[:1], 0, is_filler=True)
    return Batch(inputs[rows], targets[rows], count_units(targets[rows]))


def train_by_name(name: str, device: str = "cpu") -> Trace:
    return train(next(case for case in CASES if case.name == name), device)


def check(case: Case, *, optimizer: str | None = None) -> dict[str, float]:
    """Run it and the plain loop, which may be given another optimizer; the largest differences.

    Raises:
        AssertionError: one is larger than the case allows.
    """
    expected = reference.plain_training(
        case.model(), case.loss(), case.batches(), optimizer or case.optimizer, clip_norm=case.clip_norm
    )
    traces = call_on_ranks(train_by_name, case.ranks, case.name, timeout_s=300) if case.ranks > 1 else [alone(case)]
    return compare(case, traces, expected)


def compare(case: Case, traces: list[Trace], expected: Trace) -> dict[str, float]:
    """The largest differences of all ranks from the plain loop.

    Raises:
        AssertionError: one is larger than the case allows.
    """
    worst = {"loss": 0.0, "norm": 0.0, "parameter": 0.0, "buffer": 0.0}
    seen: set[str] = set()
    for trace in traces:
        pairs = zip(trace.losses, expected.losses, strict=True)
        worst["loss"] = max(worst["loss"], *(abs(a - b) for a, b in pairs))
        pairs = zip(trace.norms, expected.norms, strict=True)
        worst["norm"] = max(worst["norm"], *(abs(a - b) / b for a, b in pairs))
        for name, value in trace.parameters.items():
            worst["parameter"] = max(worst["parameter"], (value - expected.parameters[name]).abs().max().item())
        for name, value in trace.buffers.items():
            worst["buffer"] = max(worst["buffer"], (value - expected.buffers[name]).abs().max().item())
        seen |= trace.parameters.keys()
    assert seen == expected.parameters.keys(), (case.name, seen ^ expected.parameters.keys())
    assert worst["loss"] <= case.loss_tolerance, (case.name, worst)
    assert worst["norm"] <= case.norm_tolerance, (case.name, worst)
    assert worst["parameter"] <= case.parameter_tolerance, (case.name, worst)
    assert worst["buffer"] <= 1e-6, (case.name, worst)
    return worst


def alone(case: Case) -> Trace:
    if not case.plan.is_sharded:
        return train(case)
    [trace] = call_on_ranks(train_by_name, 1, case.name)
    assert isinstance(trace, Trace)
    return trace


def plan(*, schedule: str = "1f1b", **settings: Any) -> Plan:
    axes = {axis: settings.pop(axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp") if axis in settings}
    return Plan(mesh=Mesh(**axes), schedule=schedule, **settings)


def one_rank() -> Iterator[Case]:
    yield Case("single", plan())
    yield Case("single accumulate 3, uneven", plan(accumulate=3), last=7)
    yield Case("single, recomputed", plan(recompute="full"))
    yield Case("single, recomputed selectively", plan(recompute="selective"))
    yield Case("single, recomputed selectively, in place", plan(recompute="selective"), in_place)
    yield Case("single, recomputed selectively, gated", plan(recompute="selective"), gated)
    yield Case("single, recomputed, batch norm", plan(recompute="full"), cnn_with_norms)
    yield Case("single, recomputed selectively, batch norm", plan(recompute="selective"), cnn_with_norms)
    yield Case("single, ignored tokens, accumulate 2", plan(accumulate=2), ignored=True)
    yield Case("single fsdp", plan(zero=3))


def one_axis() -> Iterator[Case]:
    for ranks in (2, 4, 8):
        yield Case(f"ddp {ranks}", plan(dp_replicate=ranks), last=13)
        yield Case(f"ddp accumulate {ranks}", plan(dp_replicate=ranks, accumulate=2), ignored=True)
        for stage in (1, 2, 3):
            yield Case(f"zero-{stage} {ranks}", plan(dp_shard=ranks, zero=stage), last=13)
            yield Case(f"zero-{stage} accumulate {ranks}", plan(dp_shard=ranks, zero=stage, accumulate=2), last=3)
        yield Case(f"tp {ranks}", plan(tp=ranks, sequence_parallel=False))
        yield Case(f"tp+sp {ranks}", plan(tp=ranks), last=11)
        yield Case(f"tp+sp+loss {ranks}", plan(tp=ranks, loss_parallel=True), ignored=True)
        for schedule in ("gpipe", "1f1b"):
            yield Case(f"{schedule} {ranks}", plan(pp=ranks, schedule=schedule), decoder, last=10)
        yield Case(f"sync batch norm {ranks}", plan(dp_replicate=ranks, batchnorm="sync"), cnn_with_norms, last=11)
    for ranks in (2, 4, 8):
        for schedule in ("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv-zero-bubble", "dualpipe-v"):
            model = deep if ranks == 8 else decoder
            yield Case(f"{schedule} {ranks}", plan(pp=ranks, schedule=schedule), model, last=10)


def details() -> Iterator[Case]:
    yield Case(
        "ddp 2, clipped, adamw", plan(dp_replicate=2), optimizer="adamw", clip_norm=0.5, parameter_tolerance=1e-4
    )
    yield Case("zero-3 2, clipped", plan(dp_shard=2), clip_norm=0.5)
    yield Case("zero-3 2, recomputed", plan(dp_shard=2, recompute="full"))
    yield Case("zero-3 2, recomputed selectively", plan(dp_shard=2, recompute="selective"))
    yield Case("zero-3 2, offloaded", plan(dp_shard=2, offload=True))
    yield Case("zero-3 2, tied", plan(dp_shard=2), tied)
    yield Case("zero-3 4, one example", plan(dp_shard=4), last=1)
    yield Case("tp 2, tied", plan(tp=2), tied)
    yield Case("tp 2, grouped queries", plan(tp=2), grouped)
    yield Case("1f1b 2, tied", plan(pp=2), tied)
    yield Case("zbv-zero-bubble 2, tied", plan(pp=2, schedule="zbv-zero-bubble"), tied_deep)
    yield Case("zbv-zero-bubble 2, views", plan(pp=2, schedule="zbv-zero-bubble"), viewed)
    yield Case("1f1b 2, float64, not contiguous", plan(pp=2), turned, clip_norm=0.5)
    yield Case("1f1b 2, ignored tokens", plan(pp=2), ignored=True)


def several_axes() -> Iterator[Case]:
    yield Case("hsdp 2x2", plan(dp_replicate=2, dp_shard=2), last=13)
    yield Case("hsdp 2x4", plan(dp_replicate=2, dp_shard=4))
    yield Case("sync batch norm, hsdp 2x2", plan(dp_replicate=2, dp_shard=2, batchnorm="sync"), cnn_with_norms)
    yield Case("fsdp x tp 2x2", plan(dp_shard=2, tp=2), last=13, clip_norm=0.5)
    yield Case("fsdp x tp 4x2", plan(dp_shard=4, tp=2))
    yield Case("ddp x tp 2x2", plan(dp_replicate=2, tp=2))
    yield Case("hsdp x tp 2x2x2", plan(dp_replicate=2, dp_shard=2, tp=2))
    yield Case("pp x fsdp 2x2", plan(pp=2, dp_shard=2), last=13, clip_norm=0.5)
    yield Case("pp x ddp 2x2, tied", plan(pp=2, dp_replicate=2), tied)
    yield Case("pp x tp 2x2", plan(pp=2, tp=2), ignored=True)
    yield Case("pp x tp 2x2, tied", plan(pp=2, tp=2), tied)
    yield Case("pp x tp 2x2, loss parallel", plan(pp=2, tp=2, loss_parallel=True))
    yield Case("pp x tp 2x2, loss parallel, tied", plan(pp=2, tp=2, loss_parallel=True), tied)
    yield Case("pp x tp 2x2, the head alone", plan(pp=2, tp=2), before_head)
    yield Case("pp x tp 2x2, norm and head", plan(pp=2, tp=2, loss_parallel=True), before_norm)
    yield Case("pp x fsdp x tp 2x2x2, the head alone", plan(pp=2, dp_shard=2, tp=2), before_head)
    for ranks, axes in {"2x4": {"pp": 2, "dp_shard": 4}, "4x2": {"pp": 4, "dp_shard": 2}}.items():
        yield Case(f"pp x fsdp {ranks}", plan(**axes), decoder)
    for ranks, axes in {"2x4": {"pp": 2, "tp": 4}, "4x2": {"pp": 4, "tp": 2}}.items():
        yield Case(f"pp x tp {ranks}", plan(**axes), decoder)
    yield Case("fsdp x tp 2x4", plan(dp_shard=2, tp=4))
    yield Case("ddp x tp 4x2", plan(dp_replicate=4, tp=2))
    yield Case("hsdp 4x2", plan(dp_replicate=4, dp_shard=2), last=13)
    yield Case("pp x hsdp 2x2x2", plan(pp=2, dp_replicate=2, dp_shard=2), tied)
    yield Case("pp x fsdp x tp 2x2x2", plan(pp=2, dp_shard=2, tp=2))
    yield Case("pp x fsdp x tp 2x2x2, gpipe", plan(pp=2, dp_shard=2, tp=2, schedule="gpipe"), last=5)
    yield Case("pp x fsdp x tp 2x2x2, interleaved", plan(pp=2, dp_shard=2, tp=2, schedule="interleaved-1f1b"), four)
    yield Case("pp x ddp x tp 2x2x2", plan(pp=2, dp_replicate=2, tp=2))


def other_models() -> Iterator[Case]:
    for name, model in {"mlp": mlp, "cnn": cnn, "own sequential": own_sequential, "own module": own_module}.items():
        yield Case(f"{name}: ddp 2", plan(dp_replicate=2), model, last=5)
        yield Case(f"{name}: zero-3 2", plan(dp_shard=2), model, last=5)
        if name != "own module":
            yield Case(f"{name}: 1f1b 2", plan(pp=2), model, last=5)
        if name in ("mlp", "cnn"):
            yield Case(f"{name}: tp 2", plan(tp=2), model, last=5)


def batch_norms() -> Iterator[Case]:
    """Their running statistics are part of what must be equal."""
    whole_batch = {"schedule": "gpipe", "num_microbatches": 1}
    yield Case("batch norm, tp 2", plan(tp=2), cnn_with_norms)
    yield Case("batch norm, gpipe 2 in one", plan(pp=2, **whole_batch), cnn_with_norms)
    yield Case("sync batch norm, zero-3 2", plan(dp_shard=2, batchnorm="sync"), cnn_with_norms, last=11)
    yield Case("sync batch norm, ddp x tp 2x2", plan(dp_replicate=2, tp=2, batchnorm="sync"), cnn_with_norms)
    yield Case(
        "sync batch norm, gpipe x ddp 2x2", plan(pp=2, dp_replicate=2, batchnorm="sync", **whole_batch), cnn_with_norms
    )
    yield Case(
        "sync batch norm 2, recomputed", plan(dp_replicate=2, batchnorm="sync", recompute="full"), cnn_with_norms
    )


def frozen_parameters() -> Iterator[Case]:
    """An embedding and the norms keep their values."""
    axes = ({"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2})
    for name, axis in zip(("ddp", "zero-3", "tp+sp", "1f1b"), axes, strict=True):
        yield Case(f"frozen: {name} 2", plan(**axis), frozen, clip_norm=0.5)
    yield Case("frozen: fsdp x tp 2x2", plan(dp_shard=2, tp=2), frozen, clip_norm=0.5)


def shared_modules() -> Iterator[Case]:
    """The same object in several places of a model."""
    yield Case("repeating: 1f1b 2", plan(pp=2), repeating, last=5, optimizer="adamw")
    yield Case("repeating: zero-3 2", plan(dp_shard=2), repeating, last=5)
    yield Case("repeating: interleaved-1f1b 2", plan(pp=2, schedule="interleaved-1f1b"), repeating, last=5)
    yield Case("tied blocks: zero-3 2", plan(dp_shard=2), tied_blocks, last=5)


def odd_parameters() -> Iterator[Case]:
    """Scalars, one frozen and one shared, transposed weights, buffers that overlap themselves, sparse gradients."""
    odd = odd_models.odd
    yield Case("odd: single, accumulate 2", plan(accumulate=2), odd)
    yield Case("odd: ddp 2", plan(dp_replicate=2), odd, last=5, clip_norm=0.5)
    yield Case("odd: zero-1 2, accumulate 2", plan(dp_shard=2, zero=1, accumulate=2), odd, last=5)
    yield Case("odd: zero-3 2", plan(dp_shard=2, accumulate=2), odd, last=5, clip_norm=0.5)
    yield Case("odd: zero-3 2, recomputed", plan(dp_shard=2, recompute="full"), odd)
    yield Case("odd: zero-3 2, offloaded", plan(dp_shard=2, offload=True), odd)
    yield Case("odd: hsdp 2x2", plan(dp_replicate=2, dp_shard=2), odd, clip_norm=0.5)
    yield Case("odd: tp 2", plan(tp=2), odd, clip_norm=0.5)
    yield Case("odd: fsdp x tp 2x2", plan(dp_shard=2, tp=2), odd, clip_norm=0.5)
    yield Case("odd: 1f1b 2", plan(pp=2), odd, clip_norm=0.5)
    yield Case("odd: zbv x fsdp 2x2", plan(pp=2, dp_shard=2, schedule="zbv-zero-bubble"), odd_models.unshared)
    yield Case("odd: pp x ddp 2x2", plan(pp=2, dp_replicate=2), odd, clip_norm=0.5)


def compiled() -> Iterator[Case]:
    """These need a C++ compiler, and a minute each."""
    yield Case("single, compiled", plan(compile=True), loss_tolerance=1e-5, norm_tolerance=1e-5)
    yield Case("ddp 2, compiled", plan(dp_replicate=2, compile=True), loss_tolerance=1e-5, norm_tolerance=1e-5)
    yield Case("zero-3 2, compiled", plan(dp_shard=2, compile=True), loss_tolerance=1e-5, norm_tolerance=1e-5)


def half_precision() -> Iterator[Case]:
    bf16 = {"loss_tolerance": 2e-2, "norm_tolerance": 3e-2, "parameter_tolerance": 1e-2}
    yield Case("single bf16", plan(precision="bf16"), **bf16)  # type: ignore[arg-type]
    yield Case("ddp 2 bf16", plan(dp_replicate=2, precision="bf16"), **bf16)  # type: ignore[arg-type]
    yield Case("zero-3 2 bf16", plan(dp_shard=2, precision="bf16"), **bf16)  # type: ignore[arg-type]
    yield Case("zero-3 2 bf16 reduced", plan(dp_shard=2, precision="bf16", reduce_dtype="bf16"), **bf16)  # type: ignore[arg-type]
    yield Case("tp 2 bf16", plan(tp=2, precision="bf16"), **bf16)  # type: ignore[arg-type]
    yield Case("1f1b 2 bf16", plan(pp=2, precision="bf16"), **bf16)  # type: ignore[arg-type]


def deep() -> nn.Module:
    return decoder(16)


def grouped() -> nn.Module:
    return decoder(2, heads=8, kv_heads=2)


def tied_deep() -> nn.Module:
    return decoder(4, tied=True)


def four() -> nn.Module:
    return decoder(4)


CASES = [
    *one_rank(),
    *one_axis(),
    *details(),
    *several_axes(),
    *other_models(),
    *shared_modules(),
    *batch_norms(),
    *frozen_parameters(),
    *odd_parameters(),
    *half_precision(),
    *compiled(),
]


def main() -> None:
    """The matrix as a table: `python -m tests.parallel.engine.cases [WORD..]`, those with a word in their names."""
    import sys
    import time
    import traceback

    words = sys.argv[1:]
    torch.set_num_threads(1)
    failed = []
    print(f"{'case':<44} {'ranks':>5} {'loss':>9} {'norm':>9} {'parameter':>9} {'buffer':>9} {'s':>6}")
    for case in CASES:
        if words and not any(word in case.name for word in words):
            continue
        began = time.monotonic()
        try:
            worst = check(case)
        except Exception as error:
            failed.append(case.name)
            print(f"{case.name:<44} {case.ranks:>5} FAILED {type(error).__name__}: {str(error)[-3000:]}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=1)
            continue
        figures = " ".join(f"{value:9.1e}" for value in worst.values())
        print(f"{case.name:<44} {case.ranks:>5} {figures} {time.monotonic() - began:6.1f}", flush=True)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(CASES)} differ: {', '.join(failed)}")


if __name__ == "__main__":
    main()

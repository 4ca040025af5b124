"""The search over all meshes of a cluster: the plans that fit a model, best first, and the reasons against others.

A mesh is tried with the stages of ZeRO, the schedules of a pipeline, and the largest micro-batch that fits, or with
recomputation if none does. Plans are ranked by predicted tokens per second. If two are within a per cent of each other,
the prediction cannot tell them apart and the one with fewer moving parts is better.

The rules of the field follow: tensor parallelism inside a node, since its activations are waited for; pipeline and data
across nodes, since they send less or later; ZeRO if memory is short. Sources: Narayanan et al. 2021, section 3 (its
"takeaways"); Rajbhandari et al. 2020, section 5.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from atoll.ground.printable import count_of
from atoll.parallel.engine.mesh import AXES, Mesh, meshes
from atoll.parallel.engine.plan import SPLIT, Plan
from atoll.parallel.planner.accounting import ACCOUNTINGS
from atoll.parallel.planner.candidate import ITEM_BYTES, MOMENTS, Candidate, crosses
from atoll.parallel.planner.cluster import Cluster
from atoll.parallel.planner.memory import worst
from atoll.parallel.planner.prediction import Prediction, predict
from atoll.parallel.planner.shape import ModelShape

CLOSE = 0.99
"""Ratio from which on two predictions count as equal."""

PIPELINES = (("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-zero-bubble", 2))
"""The schedules of the search, with the stages on each rank."""

MICROBATCH_MAX = 4096
"""Most sequences of a micro-batch that the search tries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The training that the search plans."""

    batch: int
    """Sequences of one step, on all ranks together (>= 1)."""
    precision: str = "bf16"
    """The precision of products: bf16 or fp32."""
    optimizer: str = "adamw"
    """The optimizer, which determines the state."""
    counted: str = "engine"
    """The accounting of memory: `engine`, or a convention of `accounting`."""

    def __post_init__(self) -> None:
        rules = {
            f"batch: must be a whole number >= 1, got {self.batch!r}": type(self.batch) is int and self.batch >= 1,
            **{
                f"{name}: must be one of {', '.join(allowed)}, got {getattr(self, name)!r}": getattr(self, name)
                in allowed
                for name, allowed in (
                    ("precision", tuple(ITEM_BYTES)),
                    ("optimizer", tuple(MOMENTS)),
                    ("counted", ("engine", *ACCOUNTINGS)),
                )
            },
        }
        if faults := [f"training.{fault}" for fault, is_met in rules.items() if not is_met]:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search."""

    ranked: tuple[Prediction, ...]
    """The best plan of each mesh that fits, the best mesh first."""
    refused: tuple[tuple[str, int, str], ...]
    """The reasons against the other meshes, the most frequent first: the reason, the number of meshes, one of them."""


def search(model: ModelShape, cluster: Cluster, wanted: Wanted, *, only: Mesh | None = None) -> Found:
    """Try every mesh with a rank for each device of the cluster, or `only` one.

    Raises:
        ValueError: `only` has another number of ranks.
    """
    if only is not None:
        only.check_world(cluster.world)
    best: list[Prediction] = []
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for mesh in [only] if only is not None else list(meshes(cluster.world)):
        found, reason = _best_of(model, cluster, wanted, mesh, is_free=only is None)
        if found is not None:
            best.append(found)
        else:
            counts[reason.kind] += 1
            examples.setdefault(reason.kind, reason.text)
    refused = tuple((kind, count, examples[kind]) for kind, count in counts.most_common())
    return Found(tuple(ranked(best)), refused)


def ranked(predictions: list[Prediction]) -> list[Prediction]:
    """Sort by speed; ties within 1 % go to the simplest plan."""
    by_speed = sorted(predictions, key=lambda found: -found.tokens_per_s)
    if not by_speed:
        return []
    close = [found for found in by_speed if found.tokens_per_s >= CLOSE * by_speed[0].tokens_per_s]
    first = min(close, key=lambda found: (complexity(found.candidate), found.memory.total))
    return [first, *(found for found in by_speed if found is not first)]


def complexity(candidate: Candidate) -> tuple[int, int, int]:
    """Return the number of a plan's moving parts: axes, ZeRO's stage, recomputation."""
    axes = sum(degree > 1 for degree in candidate.mesh.degrees.values())
    return axes, candidate.plan.zero_stage, ("none", "selective", "full").index(candidate.plan.recompute)


# ---------------------------------------------------------------- one mesh


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason against a mesh, and the number that shows it."""

    kind: str
    text: str


def _best_of(
    model: ModelShape, cluster: Cluster, wanted: Wanted, mesh: Mesh, *, is_free: bool
) -> tuple[Prediction | None, Reason]:
    reason = misfit(model, cluster, wanted, mesh, is_free=is_free)
    if reason is not None:
        return None, reason
    candidates = list(_candidates(model, cluster, wanted, mesh))
    fitting = [candidate for candidate, memory in candidates if memory <= cluster.room]
    if not fitting:
        kind = f"more memory than the {cluster.room / 1e9:.4g} GB of a device that may be filled"
        if not candidates:
            return None, Reason(
                "fewer micro-batches than stages", f"{mesh}: a batch of {count_of(wanted.batch, 'sequence')}"
            )
        return None, Reason(kind, f"{mesh}: {min(memory for _, memory in candidates) / 1e9:.4g} GB")
    found = [predict(model, candidate, cluster, counted=wanted.counted) for candidate in fitting]
    return ranked(found)[0], Reason("", "")


def misfit(model: ModelShape, cluster: Cluster, wanted: Wanted, mesh: Mesh, *, is_free: bool = True) -> Reason | None:
    """Return the first reason against a mesh apart from its memory, or None. A requested mesh may cross nodes."""
    divisible = {
        "heads": model.heads,
        "kv_heads": model.num_kv_heads,
        "ffn": model.width,
        "vocab": model.vocab,
        "sequence": model.sequence,
    }
    for name, number in divisible.items():
        if number % mesh.tp:
            return Reason(f"tp does not divide {name}={number}", f"tp={mesh.tp}")
    if is_free and crosses(mesh, "tp", cluster):
        return Reason(
            "tensor parallelism would cross nodes",
            f"tp={mesh.tp} with {count_of(cluster.per_node, 'device')} in a node",
        )
    if mesh.pp > model.layers:
        return Reason(f"more stages than the {count_of(model.layers, 'block')}", f"pp={mesh.pp}")
    if wanted.batch % mesh.dp:
        return Reason(f"dp does not divide the batch of {count_of(wanted.batch, 'sequence')}", f"dp={mesh.dp}")
    return None


def _candidates(model: ModelShape, cluster: Cluster, wanted: Wanted, mesh: Mesh) -> Iterator[tuple[Candidate, float]]:
    """Yield, for each kind of plan, the largest micro-batch that fits, or else the smallest; with its memory."""
    for plan in _plans(model, wanted, mesh):
        tried = list(_sized(model, plan, wanted, cluster))
        if tried:
            yield tried[-1]


def _plans(model: ModelShape, wanted: Wanted, mesh: Mesh) -> Iterator[Plan]:
    for schedule, stages_per_rank in PIPELINES if mesh.pp > 1 else PIPELINES[:1]:
        if mesh.pp * stages_per_rank > model.layers:
            continue
        for zero in (1, 2, 3) if mesh.dp_shard > 1 else (None,):
            for recompute in ("none", "selective", "full"):
                if mesh.pp > 1 and schedule in SPLIT and (zero == 3 or recompute != "none"):
                    continue  # refused by the engine
                yield Plan(
                    mesh=mesh,
                    zero=zero,
                    schedule=schedule,
                    stages_per_rank=stages_per_rank if stages_per_rank > 1 else None,
                    precision=wanted.precision,
                    loss_parallel=mesh.tp > 1,
                    recompute=recompute,
                )


def _sized(model: ModelShape, plan: Plan, wanted: Wanted, cluster: Cluster) -> Iterator[tuple[Candidate, float]]:
    """Yield the plan with increasing micro-batches, while they fit."""
    rows = wanted.batch // plan.mesh.dp
    for microbatch in _divisors(rows):
        number = rows // microbatch
        if plan.mesh.pp == 1:
            sized = replace(plan, accumulate=number)
        elif number < plan.num_stages or (plan.schedule.startswith("interleaved") and number % plan.mesh.pp):
            continue
        else:
            sized = replace(plan, num_microbatches=number)
        candidate = Candidate(plan=sized, microbatch=microbatch, optimizer=wanted.optimizer)
        needed = worst(model, candidate, counted=wanted.counted).total
        if needed > cluster.room and microbatch > 1:
            return
        yield candidate, needed


@lru_cache(maxsize=256)
def _divisors(rows: int) -> tuple[int, ...]:
    return tuple(number for number in range(1, min(rows, MICROBATCH_MAX) + 1) if rows % number == 0)


# ---------------------------------------------------------------- in words


def lost(found: Prediction, best: Prediction) -> str:
    """Return the reason why a plan is slower than the chosen one: the part on which it spends more time."""
    slower = found.times.step / best.times.step
    if slower <= 1 / CLOSE:
        is_simpler = complexity(found.candidate) <= complexity(best.candidate)
        return "as fast, but needs more memory" if is_simpler else "as fast, but with more moving parts"
    words = {
        "compute": "recomputes" if found.candidate.plan.recompute != "none" else "stages of unequal work",
        "tensor": "waits for activations along tp",
        "idle": f"bubble {found.bubble:.0%}",
        "data": "waits for parameters and gradients",
        "fill": "waits for the pipeline to fill",
        "update": "updates more parameters on each rank",
    }
    extra = {name: getattr(found.times, name) - getattr(best.times, name) for name in words}
    term = max(extra, key=lambda name: extra[name])
    return f"{slower - 1:.0%} slower: {words[term]} (+{extra[term]:.3g} s)"


def why(model: ModelShape, cluster: Cluster, found: Found) -> list[str]:
    """Return sentences about the first plan: the purpose of each of its axes, and the best plan without it."""
    best = found.ranked[0]
    sentences = [_need(model, cluster, best.candidate)]
    for axis in AXES:
        degree = best.candidate.mesh.degrees[axis]
        if degree > 1:
            sentences.append(f"{axis}={degree}: {_purpose(axis, best, cluster)}; {_without(axis, best, found)}.")
    return sentences


def _need(model: ModelShape, cluster: Cluster, candidate: Candidate) -> str:
    alone = Candidate(plan=Plan(precision=candidate.plan.precision), optimizer=candidate.optimizer)
    states, room = worst(model, alone).states, cluster.room
    if states <= room:
        return f"The state of the whole model is {states / 1e9:.4g} GB and fits the {room / 1e9:.4g} GB of one device."
    return (
        f"The state of the whole model is {states / 1e9:.4g} GB, {states / room:.1f} times the {room / 1e9:.4g} GB "
        f"of one device that may be filled."
    )


def _purpose(axis: str, best: Prediction, cluster: Cluster) -> str:
    plan = best.candidate.plan
    where = "across nodes" if crosses(best.candidate.mesh, axis, cluster) else "inside a node"
    return {
        "tp": f"every product is sharded {where}; its activations are waited for ({best.times.tensor:.3g} s)",
        "pp": f"stages {where} send little; "
        f"{count_of(plan.microbatches, 'micro-batch keeps', 'micro-batches keep')} the bubble at {best.bubble:.1%}",
        "dp_shard": f"ZeRO-{plan.zero_stage} {where} shards the state",
        "dp_replicate": f"copies {where} sum gradients during the backward pass",
    }[axis]


def _without(axis: str, best: Prediction, found: Found) -> str:
    others = [other for other in found.ranked if other.candidate.mesh.degrees[axis] == 1]
    if not others:
        return "no mesh without it fits"
    slower = others[0].times.step / best.times.step - 1
    compared = f"{slower:.0%} slower" if slower > 1 / CLOSE - 1 else "as fast, with more moving parts or memory"
    return f"the best mesh without it ({others[0].candidate.mesh}) is {compared}"

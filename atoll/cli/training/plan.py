"""`atoll plan`: compare the meshes on which a model can be trained on a cluster, and explain the fastest one."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.command import if_stopped
from atoll.cli.printing import as_json, say, table
from atoll.cli.requested import requested
from atoll.ground.printable import count_of, printable_size
from atoll.operations.requests import PlanRequest

if TYPE_CHECKING:
    from atoll.operations.plan import DryRunOf, Planned, SiteNeeds
    from atoll.parallel.planner.candidate import Candidate
    from atoll.parallel.planner.cluster import Cluster
    from atoll.parallel.planner.dry_run import DryRun
    from atoll.parallel.planner.prediction import Prediction
    from atoll.parallel.planner.search import Found, Wanted
    from atoll.parallel.planner.shape import ModelShape

Top = Annotated[int, typer.Option("--top", metavar="N", callback=options.between(1), help="Number of meshes to show.")]


@requested(PlanRequest)
def plan(request: PlanRequest, top: Top = 8, json: options.Json = False) -> None:
    """List the meshes on which a model can be trained on a cluster, the fastest first, and explain the order.

    Each has its memory, traffic, pipeline bubble and step time.

    Nothing is started, and no GPU is needed. `docs/planning.md` explains every number.
    """
    if_stopped("before the plan was complete; nothing was written")
    from atoll.operations import plan as operation
    from atoll.parallel.planner.search import why

    planned = operation.plan(request)
    if json:
        as_json(_document(planned, top))
        return
    shape, cluster, found, best = planned.shape, planned.cluster, planned.found, planned.found.ranked[0]
    _say_arguments(request.model, shape, cluster, planned.wanted)
    _say_ranked(found, top)
    say("\nThe fastest plan")
    for sentence in [_in_words(best.candidate), *why(shape, cluster, found)]:
        say(f"  {sentence}")
    _say_costs(shape, cluster, best)
    if planned.needs is not None:
        _say_needs(planned.needs)
    for run in planned.dry_runs:
        _say_dry_run(run)


# ---------------------------------------------------------------- text output


def _say_arguments(name: str, shape: "ModelShape", cluster: "Cluster", wanted: "Wanted") -> None:
    say(
        f"{name}: {shape.parameters / 1e9:.4g} B parameters, {count_of(shape.layers, 'block')} "
        f"of width {shape.hidden}\n"
        f"{count_of(cluster.world, 'device')} ({cluster.nodes} x {cluster.per_node}) of "
        f"{printable_size(round(cluster.memory))}, "
        f"{cluster.usable:.0%} of it for the plan\n"
        f"{count_of(wanted.batch, 'sequence')} of {count_of(shape.sequence, 'token')} in a step, "
        f"{wanted.precision}, {wanted.optimizer}\n"
    )


def _say_ranked(found: "Found", top: int) -> None:
    from atoll.parallel.planner.search import lost

    best = found.ranked[0]
    rows = [_row(number, one) for number, one in enumerate(found.ranked[:top], 1)]
    table(
        ["#", "pp", "rep", "shard", "tp", "zero", "m x b", "recompute", "memory", "bubble", "step", "tokens/s", "MFU"],
        rows,
        empty="",
    )
    if len(found.ranked) > 1:
        say("\nWhy the other meshes rank lower")
        for number, one in enumerate(found.ranked[1:top], 2):
            say(f"  {number}: {lost(one, best)}")
    if len(found.ranked) > top:
        say(f"  and {count_of(len(found.ranked) - top, 'more mesh that fits', 'more meshes that fit')} (--top)")
    for kind, count, example in found.refused:
        say(f"  {count} {'mesh is' if count == 1 else 'meshes are'} impossible: {kind} ({example})")


def _row(number: int, found: "Prediction") -> Sequence[object]:
    plan, mesh = found.candidate.plan, found.candidate.mesh
    microbatches = f"{plan.microbatches} x {found.candidate.microbatch}"
    return (
        *(number, mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.tp, plan.zero_stage),
        *(microbatches, plan.recompute, printable_size(round(found.memory.total))),
        *(f"{found.bubble:.1%}", f"{found.times.step:.4g} s", f"{found.tokens_per_s:.4g}", f"{found.mfu:.1%}"),
    )


def _in_words(candidate: "Candidate") -> str:
    plan = candidate.plan
    stages = f", {plan.stages} stages on a rank" if plan.stages > 1 else ""
    pipeline = f"schedule {plan.schedule}{stages}, " if plan.mesh.pp > 1 else ""
    data_parallelism = (
        "DDP"
        if plan.is_ddp
        else f"ZeRO-{plan.zero_stage}"
        if plan.mesh.dp_shard > 1
        else "no sharding over data-parallel ranks"
    )
    return (
        f"{plan.mesh}: {data_parallelism}, "
        f"{pipeline}{count_of(plan.microbatches, 'micro-batch', 'micro-batches')} of {candidate.microbatch}, "
        f"recomputes {plan.recompute}."
    )


def _say_costs(shape: "ModelShape", cluster: "Cluster", best: "Prediction") -> None:
    from atoll.parallel.planner.candidate import crosses
    from atoll.parallel.planner.prediction import seconds, sent_by

    say("\nMemory of the rank with the largest need")
    terms = {field.name: getattr(best.memory, field.name) for field in dataclasses.fields(best.memory)}
    table(
        ["term", "bytes"],
        [(name, printable_size(round(value))) for name, value in {**terms, "total": best.memory.total}.items()],
        empty="",
    )
    say("\nTraffic of the first rank of the first stage in a step")
    table(
        ["axis", "link", "kind", "of", "calls", "sent", "time", "behind"],
        [
            (
                *(item.axis, "across nodes" if crosses(best.candidate.mesh, item.axis, cluster) else "in the node"),
                *(item.kind, item.what, item.count, printable_size(round(item.sent))),
                *(f"{seconds(item, best.candidate, cluster):.3g} s", item.behind or "nothing"),
            )
            for item in sent_by(shape, best.candidate, 0)
        ],
        empty="no traffic: one device",
    )
    say("\nTime of a step")
    times = {field.name: getattr(best.times, field.name) for field in dataclasses.fields(best.times)}
    table(["part", "seconds"], [*times.items(), ("step", best.times.step)], empty="")


def _say_needs(found: "SiteNeeds") -> None:
    """Print the needs of a site."""
    from atoll.parallel.planner.client import AGENT_BYTES, BLOCK_BYTES

    needs, line = found.needs, found.line
    say("\nThe needs of a site with this plan")
    rows = [("version, down", needs.down), ("update, up", needs.up)]
    table(
        ["each round", "bytes", f"at {_speed(line)}"],
        [(name, printable_size(size), _duration(needs.seconds(size, line))) for name, size in rows],
        empty="",
    )
    total = sum(needs.disk.values())
    say("")
    table(
        ["on the site's disk", "bytes"],
        [(name, printable_size(size)) for name, size in [*needs.disk.items(), ("total", total)]],
        empty="",
    )
    spool = needs.disk["updates"]
    if spool > 8 * 2**30:
        say(f"The agent's spool_max_bytes must be at least {spool} (its default is 8 GiB).")
    say("")
    table(
        ["ranks", "in training", "loads", "boxes", "sends"],
        [
            (
                *(_in_runs(each.ranks), printable_size(round(each.memory.total)), printable_size(each.held)),
                *(each.boxes, printable_size(each.part)),
            )
            for each in needs.ranks
        ],
        empty="",
    )
    say(
        f"Beside its shards a rank holds {printable_size(BLOCK_BYTES)} while it loads and writes; the agent holds "
        f"{printable_size(AGENT_BYTES)}. No process holds the whole model."
    )


def _in_runs(ranks: tuple[int, ...]) -> str:
    """Return ranks as text: 0-3, 8 and 12 more."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][-1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:3])
    rest = sum(b - a + 1 for a, b in runs[3:])
    return shown + (f" and {rest} more" if rest else "")


def _speed(line: float) -> str:
    from atoll.operations.plan import UNITS

    unit = next(name for name, bits in reversed(UNITS.items()) if line >= bits or name == "bit")
    return f"{line / UNITS[unit]:.4g} {unit}/s"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _say_dry_run(of: "DryRunOf") -> None:
    """Print a dry run beside its prediction."""
    from atoll.operations.plan import compared

    say(f"\nDry run of rank {of.rank}: one step of the engine")
    table(
        ["", "measured", "predicted", ""],
        [
            (
                row["what"],
                *(
                    value if row["what"].endswith("calls") else printable_size(value)
                    for value in (row["measured"], row["predicted"])
                ),
                _verdict(row),
            )
            for row in compared(of)
        ],
        empty="",
    )
    say("\nComputation that can hide its collectives: neither waits for the other")
    rows = [(*key, calls, hidden, f"{share:.1%}") for key, (calls, hidden, share) in of.run.hidden().items()]
    table(["axis", "kind", "calls", "can be hidden", "of the step, each"], rows, empty="no collectives")


def _verdict(row: dict[str, Any]) -> str:
    if row["is_estimate"]:
        return f"estimate, {row['predicted'] / row['measured'] - 1:+.1%}"
    return "equal" if row["measured"] == row["predicted"] else "DIFFERENT"


# ---------------------------------------------------------------- JSON output


def _document(planned: "Planned", top: int) -> dict[str, Any]:
    from atoll.operations.plan import compared
    from atoll.parallel.planner.prediction import sent_by
    from atoll.parallel.planner.search import lost, why

    shape, cluster, found = planned.shape, planned.cluster, planned.found
    best = found.ranked[0]
    return {
        "model": {**dataclasses.asdict(shape), "parameters": shape.parameters},
        "cluster": cluster,
        "training": planned.wanted,
        "plans": [
            {
                "mesh": one.candidate.mesh,
                "plan": one.candidate.plan,
                "microbatch": one.candidate.microbatch,
                "memory": {**dataclasses.asdict(one.memory), "total": one.memory.total},
                "times": {**dataclasses.asdict(one.times), "step": one.times.step},
                "bubble": one.bubble,
                "tokens_per_s": one.tokens_per_s,
                "mfu": one.mfu,
                "lost": "" if one is best else lost(one, best),
            }
            for one in found.ranked[:top]
        ],
        "why": why(shape, cluster, found),
        "traffic": sent_by(shape, best.candidate, 0),
        "refused": [{"reason": kind, "meshes": count, "example": one} for kind, count, one in found.refused],
        "dry_runs": [
            {"rank": each.rank, "compared": compared(each), "hidden": _hidden(each.run)} for each in planned.dry_runs
        ],
        **({} if planned.needs is None else {"client": planned.needs.document}),
    }


def _hidden(run: "DryRun") -> list[dict[str, Any]]:
    """Return the computation that can hide each kind of collective, for a script."""
    return [
        {"axis": axis, "kind": kind, "calls": calls, "can_be_hidden": hidden, "share_of_step": share}
        for (axis, kind), (calls, hidden, share) in run.hidden().items()
    ]

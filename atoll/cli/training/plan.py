"""`atoll plan`: compare the meshes on which a model can be trained on a cluster, and explain the fastest one."""

import dataclasses
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.aggregation.printable import count_of, printable_size
from atoll.aggregation.text_files import NotText, text_of
from atoll.cli import options
from atoll.cli.faults import CommandError
from atoll.cli.printing import as_json, say, table
from atoll.cli.stopping import if_stopped
from atoll.cli.training.plan_client import Site, check_site, needs, say_needs
from atoll.cli.training.plan_dry_runs import compared, dry_runs, hidden, say_dry_run
from atoll.cli.waiting import waiting_for

if TYPE_CHECKING:
    from atoll.parallel.planner.candidate import Candidate
    from atoll.parallel.planner.cluster import Cluster
    from atoll.parallel.planner.dry_run import DryRun
    from atoll.parallel.planner.prediction import Prediction
    from atoll.parallel.planner.search import Found, Wanted
    from atoll.parallel.planner.shape import ModelShape

TABLES = ("model", "cluster", "training")
"""The tables of a TOML that `atoll plan` reads."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset (gpt2, gpt2-xl, bert-large, turing-nlg, gpt3, llama-1b, llama-8b, llama-70b, llama-405b, "
        "qwen2.5-0.5b, qwen2.5-7b, qwen2.5-72b), numbers (layers=32,hidden=4096,heads=32,vocab=32000), "
        "a preset with other numbers (llama-8b,sequence=4096), "
        "or a TOML with the tables model, cluster and training.",
    ),
]
Machines = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="A preset (a100-80, h100-80, h200-141, cpu: one node each), or one with other numbers: "
        "h100-80,nodes=8; or nodes, per_node, memory (bytes), flops and flops_fp32 (FLOP/s), bandwidth (bytes/s of the "
        "memory), inside and across (bytes/s, in a node and between nodes); by default h100-80.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option("--batch", metavar="N", help="Sequences in one step, over all devices; by default 8 a device."),
]
MeshText = Annotated[
    str | None,
    typer.Option("--mesh", metavar="MESH", help="Only this mesh, such as pp=4,dp=4,tp=4; by default all meshes."),
]
Precision = Annotated[
    str | None,
    typer.Option("--precision", metavar="bf16|fp32", help="Precision of matrix products; by default bf16."),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer", metavar="NAME", help="Optimizer: sgd, momentum, novograd, adam, adamw or lamb; by default adamw."
    ),
]
Counted = Annotated[
    str | None,
    typer.Option(
        "--count",
        metavar="engine|lecture|zero-paper",
        help="Accounting of memory: that of this engine, or a convention of the literature; by default engine.",
    ),
]
DryRuns = Annotated[
    str,
    typer.Option(
        "--dry-run",
        metavar="RANK,...",
        help="Also build these ranks of the fastest plan with the engine, on meta tensors and without a network, run "
        "one step, and show its memory and traffic beside the prediction.",
    ),
]
Client = Annotated[
    bool,
    typer.Option(
        "--client",
        help="Also show the needs of a federated site that trains by the fastest plan: memory of each rank, disk, "
        "bytes up and down, and their seconds.",
    ),
]
Line = Annotated[
    str | None,
    typer.Option("--line", metavar="SPEED", help="The site's line, such as 100Mbit; by default 1Gbit. With --client."),
]
Codec = Annotated[
    str | None,
    typer.Option("--codec", metavar="NAME", help="Codec of the update; by default none. With --client."),
]
Lora = Annotated[
    int | None,
    typer.Option(
        "--lora",
        metavar="RANK",
        help="Adapters of this rank on every matrix of the blocks, which alone travel; by default the whole model "
        "does. With --client.",
    ),
]
Top = Annotated[int, typer.Option("--top", metavar="N", callback=options.between(1), help="Number of meshes to show.")]


def plan(
    model: Model,
    cluster: Machines = None,
    batch: Batch = None,
    mesh: MeshText = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    count: Counted = None,
    dry_run: DryRuns = "",
    client: Client = False,
    line: Line = None,
    codec: Codec = None,
    lora: Lora = None,
    top: Top = 8,
    json: options.Json = False,
) -> None:
    """List the meshes on which a model can be trained on a cluster, the fastest first, with memory, traffic, pipeline
    bubble and step time of each, and explain the order.

    Nothing is started, and no GPU is needed. `docs/planning.md` explains every number.
    """
    if_stopped("before the plan was complete; nothing was written")
    from atoll.parallel.planner.search import search, why

    given = {"batch": batch, "precision": precision, "optimizer": optimizer, "counted": count}
    shape, machines, wanted = parse_arguments(
        model, cluster, {name: value for name, value in given.items() if value is not None}
    )
    ranks, site = _ranks(dry_run, machines.world), Site(line, codec, lora)
    site.check_wanted(is_wanted=client)
    check_site(shape, site)
    try:
        only = None if mesh is None else _mesh(mesh)
        with waiting_for(f"the meshes of {count_of(machines.world, 'device')}", "each of them is predicted"):
            found = search(shape, machines, wanted, only=only)
    except ValueError as error:
        raise CommandError(*str(error).splitlines()) from error
    if not found.ranked:
        raise CommandError(
            "no mesh of this cluster can train the model",
            *(f"{count} x {kind}: {example}" for kind, count, example in found.refused),
        )
    needed = needs(shape, found.ranked[0].candidate, site) if client else None
    checked = dry_runs(shape, found.ranked[0].candidate, ranks)
    if json:
        document = _document(shape, machines, wanted, found, checked, top)
        as_json(document if needed is None else {**document, "client": needed.document})
        return
    _say_arguments(model, shape, machines, wanted)
    _say_ranked(found, top)
    best = found.ranked[0]
    say("\nThe fastest plan")
    for sentence in [_in_words(best.candidate), *why(shape, machines, found)]:
        say(f"  {sentence}")
    _say_costs(shape, machines, best)
    if needed is not None:
        say_needs(needed)
    for rank, run, predicted_for, candidate in checked:
        say_dry_run(rank, run, predicted_for, candidate)


# ---------------------------------------------------------------- the arguments


def parse_arguments(model: str, cluster: str | None, training: dict[str, Any]) -> "tuple[ModelShape, Cluster, Wanted]":
    """Return the model, the cluster and the training that the arguments name; options override the tables of a TOML.

    Raises:
        CommandError: all mistakes.
    """
    from atoll.parallel.planner.cluster import CLUSTERS, Cluster
    from atoll.parallel.planner.search import Wanted
    from atoll.parallel.planner.shape import MODELS, ModelShape
    from atoll.parallel.planner.spec import parse, read

    tables, faults = _tables(model)
    shape, fault = _attempt(
        lambda: (
            read(ModelShape, MODELS, tables["model"], what="model")
            if tables
            else parse(ModelShape, MODELS, model, what="model")
        )
    )
    faults += fault
    by_table = tables.get("cluster", {"preset": "h100-80"})
    machines, fault = _attempt(
        lambda: (
            read(Cluster, CLUSTERS, by_table, what="cluster")
            if cluster is None
            else parse(Cluster, CLUSTERS, cluster, what="cluster")
        )
    )
    faults += fault
    defaults = {"batch": 8 * (machines.world if machines else 1)}
    wanted, fault = _attempt(
        lambda: read(Wanted, {}, {**defaults, **tables.get("training", {}), **training}, what="training")
    )
    faults += fault
    if faults or shape is None or machines is None or wanted is None:
        raise CommandError(*faults)
    return shape, machines, wanted


def _attempt(make: Any) -> tuple[Any, list[str]]:
    try:
        return make(), []
    except ValueError as error:
        return None, str(error).splitlines()


def _tables(model: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    if not model.endswith(".toml"):
        return {}, []
    try:
        document = tomllib.loads(text_of(Path(model).read_bytes(), model))
    except NotText as error:
        raise CommandError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{model}: not TOML: {error}") from error
    known = {name: value for name, value in document.items() if name in TABLES and isinstance(value, dict)}
    faults = [f"{model}: {name}: unknown (tables: {', '.join(TABLES)})" for name in document if name not in known]
    return {"model": {}, **known}, faults


def _mesh(text: str) -> Any:
    from atoll.parallel.engine.mesh import parse_mesh

    return parse_mesh(text)


def _ranks(text: str, world: int) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if not word.isdecimal() or int(word) >= world]
    if wrong:
        raise CommandError(f"--dry-run: ranks must be whole numbers below {world}, got {', '.join(wrong)}")
    return [int(word) for word in words]


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


# ---------------------------------------------------------------- JSON output


def _document(
    shape: "ModelShape",
    cluster: "Cluster",
    wanted: "Wanted",
    found: "Found",
    checked: "Iterable[tuple[int, DryRun, ModelShape, Candidate]]",
    top: int,
) -> dict[str, Any]:
    from atoll.parallel.planner.prediction import sent_by
    from atoll.parallel.planner.search import lost, why

    best = found.ranked[0]
    return {
        "model": {**dataclasses.asdict(shape), "parameters": shape.parameters},
        "cluster": cluster,
        "training": wanted,
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
            {"rank": rank, "compared": compared(run, of, candidate), "hidden": hidden(run)}
            for rank, run, of, candidate in checked
        ],
    }

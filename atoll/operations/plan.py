"""Predict the meshes on which a model can be trained on a cluster, and the needs of a federated site with the best."""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.ground.printable import count_of
from atoll.ground.text_files import NotText, text_of
from atoll.operations.faults import CommandError
from atoll.operations.reporter import note, waiting_for
from atoll.operations.requests import PlanRequest
from atoll.parallel.engine.mesh import parse_mesh
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.client import ClientNeeds, needs_of, of_adapters
from atoll.parallel.planner.cluster import CLUSTERS, Cluster
from atoll.parallel.planner.memory import memory
from atoll.parallel.planner.search import Found, Wanted, search
from atoll.parallel.planner.shape import MODELS, ModelShape, as_decoder
from atoll.parallel.planner.spec import parse, read
from atoll.parallel.planner.traffic import totals
from atoll.tensors.codecs.names import parse_codec

if TYPE_CHECKING:
    from atoll.parallel.planner.dry_run import DryRun

TABLES = ("model", "cluster", "training")
"""The tables of a TOML that `atoll plan` reads."""

LINE = "1Gbit"
"""The default speed of the site's line."""

UNITS = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9, "Tbit": 1e12}
"""Bits per second by unit."""


@dataclass(frozen=True, slots=True)
class DryRunOf:
    """The dry run of a rank, with the model and the candidate that it was made for."""

    rank: int
    run: "DryRun"
    shape: ModelShape
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class SiteNeeds:
    """A site's needs, with the speed of its line [bit/s]."""

    needs: ClientNeeds
    line: float

    @property
    def document(self) -> dict[str, Any]:
        """The site's needs (memory, disk, traffic) in JSON types."""
        found = asdict(self.needs)
        for rank, needs in zip(found["ranks"], self.needs.ranks, strict=True):
            rank["memory"]["total"] = needs.memory.total
        times = {name: self.needs.seconds(found[name], self.line) for name in ("down", "up")}
        return {**found, "line": self.line, "seconds": times}


@dataclass(frozen=True, slots=True)
class Planned:
    """The meshes of a model on a cluster, the fastest first, with a site's needs and dry runs if requested."""

    shape: ModelShape
    cluster: Cluster
    wanted: Wanted
    found: Found
    needs: SiteNeeds | None
    dry_runs: Sequence[DryRunOf]


def plan(request: PlanRequest) -> Planned:
    """Predict memory and speed of all meshes on which a model can be trained on a cluster.

    Raises:
        CommandError: all mistakes in the request; or no mesh can train the model.
    """
    given = {name: getattr(request, name) for name in ("batch", "precision", "optimizer")} | {"counted": request.count}
    training = {name: value for name, value in given.items() if value is not None}
    shape, cluster, wanted = parse_arguments(request.model, request.cluster, training)
    ranks = _ranks(request.dry_run, cluster.world)
    _check_site(shape, request)
    try:
        only = None if request.mesh is None else parse_mesh(request.mesh)
        with waiting_for(f"the meshes of {count_of(cluster.world, 'device')}", "each of them is predicted"):
            found = search(shape, cluster, wanted, only=only)
    except ValueError as error:
        raise CommandError(*str(error).splitlines()) from error
    if not found.ranked:
        raise CommandError(
            "no mesh of this cluster can train the model",
            *(f"{count} x {kind}: {example}" for kind, count, example in found.refused),
        )
    best, needs = found.ranked[0].candidate, None
    if request.client:
        needed = needs_of(shape, best, codec=request.codec or "", lora=request.lora or 0)
        needs = SiteNeeds(needed, line_of(request.line or LINE))
    return Planned(shape, cluster, wanted, found, needs, dry_runs(shape, best, ranks))


def parse_arguments(model: str, cluster: str | None, training: dict[str, Any]) -> tuple[ModelShape, Cluster, Wanted]:
    """Parse the arguments into model, cluster and training; options override the tables of a TOML.

    Raises:
        CommandError: all mistakes.
    """
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


def _ranks(text: str, world: int) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if not word.isdecimal() or int(word) >= world]
    if wrong:
        raise CommandError(f"--dry-run: ranks must be whole numbers below {world}, got {', '.join(wrong)}")
    return [int(word) for word in words]


def line_of(text: str) -> float:
    """Parse the speed of a line, such as 100Mbit, into bits per second.

    Raises:
        CommandError: the text names no speed.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?bit)(?:/s)?", text.strip())
    if match is None or not float(match[1]):
        raise CommandError(f"--line: got {text!r}; allowed: a number with {', '.join(UNITS)} a second, such as {LINE}")
    return float(match[1]) * UNITS[match[2]]


def _check_site(shape: ModelShape, request: PlanRequest) -> None:
    """Check the options of a site before the search.

    Raises:
        CommandError: they are given without --client; or the line, the codec or the rank of the adapters is none.
    """
    given = {"line": request.line, "codec": request.codec, "lora": request.lora}
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if names and not request.client:
        raise CommandError(f"{', '.join(names)}: applies only to a site's needs: add --client, or leave it out")
    faults: list[str] = []
    _checked(lambda: line_of(request.line or LINE), "", faults)
    _checked(lambda: request.codec and parse_codec(request.codec), "--codec: ", faults)
    _checked(lambda: request.lora is not None and of_adapters(shape, request.lora), "--lora: ", faults)
    if faults:
        raise CommandError(*faults)


def _checked(read: Callable[[], object], key: str, faults: list[str]) -> None:
    """Call a check, and add the fault that it raises to `faults`."""
    try:
        read()
    except (CommandError, ValueError) as error:
        faults.append(f"{key}{error}")


def dry_runs(shape: ModelShape, candidate: Candidate, ranks: Sequence[int]) -> list[DryRunOf]:
    """Return the dry run of each rank."""
    found = []
    with waiting_for(
        "the dry runs", f"a step of {count_of(len(ranks), 'rank')}, without memory for its tensors"
    ) as wait:
        for rank in ranks:
            found.append(_dry_run(shape, candidate, rank))
            wait.advance(1, len(ranks))
    return found


def _dry_run(shape: ModelShape, candidate: Candidate, rank: int) -> DryRunOf:
    """Return the dry run of a rank.

    The engine builds Llama-style decoders only, so another model is replaced by the decoder of its sizes. DDP is
    replaced by `fully_shard` with replicas, as DDP's buckets need tensors with memory.
    """
    from atoll.parallel.planner.dry_run import apart

    decoder = as_decoder(shape)
    if decoder != shape:
        note("dry run: of the Llama-style decoder with these sizes, as the engine builds no other model")
    if candidate.plan.is_ddp:
        note("dry run: with fully_shard and replicas, as DDP's buckets do not run on meta tensors")
        candidate = dataclasses.replace(candidate, plan=dataclasses.replace(candidate.plan, zero=1))
    try:
        return DryRunOf(rank, apart(decoder, candidate, rank), decoder, candidate)
    except ValueError as error:
        raise CommandError(*str(error).splitlines()) from error


def compared(of: DryRunOf) -> list[dict[str, Any]]:
    """Return a dry run's measurements beside the predictions: bytes of the state, and each kind of collective."""
    run = of.run
    expected = memory(of.shape, of.candidate, run.rank)
    rows: list[dict[str, Any]] = [
        {"what": name, "measured": getattr(run, name), "predicted": getattr(expected, name), "is_estimate": False}
        for name in ("parameters", "gradients", "optimizer")
    ]
    rows.append({"what": "peak", "measured": run.peak, "predicted": round(expected.total), "is_estimate": True})
    measured, predicted = run.counted(), totals(of.shape, of.candidate, run.rank)
    for axis, kind in sorted(measured.keys() | predicted.keys()):
        calls, num_bytes = measured.get((axis, kind), (0, 0))
        expected_calls, expected_bytes = predicted.get((axis, kind), (0, 0))
        what = f"{axis} {kind}"
        rows.append({"what": f"{what}, calls", "measured": calls, "predicted": expected_calls, "is_estimate": False})
        rows.append({"what": what, "measured": num_bytes, "predicted": expected_bytes, "is_estimate": False})
    return rows

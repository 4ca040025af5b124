"""`atoll model ...`: list the versions of the global model, and export one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.group import Commands
from atoll.cli.printing import as_json, clock, metrics_text, say, table
from atoll.cli.runs.numbered import read_numbered
from atoll.ground.printable import printable_size
from atoll.operations.faults import CommandError
from atoll.operations.place import STATE
from atoll.operations.views import read_view

app = typer.Typer(cls=Commands, no_args_is_help=True, help="List the versions of the global model, or export one.")

Number = Annotated[
    int | None,
    typer.Argument(
        metavar="[VERSION]", callback=options.between(0), help="The version; by default the newest version."
    ),
]
Best = Annotated[bool, typer.Option("--best", help="The best version, by the metric `model.best` of the run.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The safetensors file to write.")]
Peft = Annotated[
    Path | None,
    typer.Option("--peft", metavar="DIR", help="Write the adapter for `PeftModel.from_pretrained` into this folder."),
]
Whole = Annotated[
    bool,
    typer.Option(
        "--whole", help="With --out: all tensors of the task's model, including those that are not exchanged."
    ),
]


@app.command("list")
def list_versions(
    run: options.Run = "",
    last: options.Last = None,
    after: options.After = None,
    state: options.State = STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """List the versions of a run's model with metrics and size, and mark the best one by `model.best`.

    The list says whether a version is still stored, and in how many parts at the aggregation ranks.
    """
    seen = read_numbered("versions", state, database, run=run, last=last, after=after)
    if json:
        as_json(seen["rows"])
        return
    table(
        ["version", "metrics", "size", "kept", "created", "digest"],
        [
            (
                *(found["version"], metrics_text(found["metrics"]), printable_size(found["num_bytes"])),
                *(_kept_text(found), clock(found["created_at"]), found["digest"][:12]),
            )
            for found in seen["rows"]
        ],
        empty=f"run {seen['run']} has no version yet",
    )


@app.command()
def export(
    out: Out = None,
    version: Number = None,
    best: Best = False,
    peft: Peft = None,
    whole: Whole = False,
    run: options.Run = "",
    state: options.State = STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """Export a version as a safetensors file, or as a PEFT adapter. Every tensor is checked against its manifest.

    SCAFFOLD's control variates are no part of the model and are left out. A version in parts at aggregation ranks is
    assembled: from the directories of the ranks that this coordinator started, and over the network from other ranks,
    for which the coordinator must run. A coordinator on another machine sends the version over the network.
    """
    from atoll.operations import adapter_export, model_export

    if (out is None) == (peft is None) or (whole and out is None):
        raise CommandError("allowed: --out FILE, --out FILE --whole, or --peft DIR")
    if best:
        if version is not None:
            raise CommandError(f"--best: got version {version}, too; allowed: one of them")
        version = model_export.best_version(read_view("versions", state, database, run=run))
    source = adapter_export.Source(state, run, version, database)
    if peft is not None:
        done = adapter_export.export_adapter(source, peft)
    elif out is not None:
        done = adapter_export.export_whole(source, out) if whole else source.export(out)
    if json:
        as_json(done)
    else:
        say(
            f"version {done.version} of {done.run} is in {done.out} "
            f"({printable_size(done.num_bytes)}, digest {done.digest[:12]})"
        )


def _kept_text(version: dict[str, Any]) -> str:
    kept = "-" if version["kept"] is None else "no"  # of a database whose state directory is elsewhere
    if version["kept"]:
        kept = "yes" if version["parts"] == 1 else f"in {version['parts']} parts"
    return f"{kept}, best" if version.get("best") else kept  # an older coordinator elsewhere names none

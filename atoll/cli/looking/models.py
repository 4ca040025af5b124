"""`atoll model ...`: the versions of the global model, and how to take one away."""

from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.faults import Commands
from atoll.cli.looking.views import open_history, read_view
from atoll.cli.printing import as_json, clock, metrics_text, say, table
from atoll.protocol.printable import printable_size

app = typer.Typer(cls=Commands, no_args_is_help=True, help="The versions of the global model.")

Number = Annotated[
    int | None,
    typer.Argument(metavar="[VERSION]", callback=options.between(0), help="Which version; by default the newest one."),
]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the safetensors file is to appear.")]


@app.command("list")
def list_versions(
    run: options.Run = "",
    state: options.State = options.STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """List the versions of a run's model: what each is worth, and whether it is still kept, perhaps in parts at the
    aggregation ranks.
    """
    seen = read_view("versions", state, database, run=run)
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
    out: Out,
    version: Number = None,
    run: options.Run = "",
    state: options.State = options.STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """Copy a version to a safetensors file; every tensor is checked against the version's manifest on the way.

    Control variates (SCAFFOLD's), which are no part of the model, stay behind. A version that lies in parts at
    aggregation ranks is put together: from the directories of the ranks that this coordinator has started, and over the
    wire from the others, for which the coordinator must run. From a coordinator elsewhere all comes over the wire.
    """
    from atoll.cli.looking import admin, model_export

    if not database and admin.is_elsewhere(state):
        done = model_export.export_remote(state, run, version, out)
    else:
        with open_history(state, database) as history:
            done = model_export.export_local(history, run, version, out)
    if json:
        as_json(done)
    else:
        say(
            f"version {done.version} of {done.run} is in {out} "
            f"({printable_size(done.num_bytes)}, digest {done.digest[:12]})"
        )


def _kept_text(version: dict[str, Any]) -> str:
    if not version["kept"]:
        return "no"
    return "yes" if version["parts"] == 1 else f"in {version['parts']} parts"

"""`atoll client ...`: who has taken part, and who may."""

from typing import Annotated

import typer

from atoll.cli import options
from atoll.cli.faults import Commands
from atoll.cli.looking.viewing import look
from atoll.cli.printing import as_json, say, seconds, table
from atoll.protocol.identity.names import Role

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Who has taken part, and who may.")


@app.command("list")
def list_clients(
    run: options.Run = "",
    state: options.State = options.STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """List the clients that ever joined a run: who is connected, how fast each was, what it has done."""
    seen = look("clients", state, database, run=run)
    if json:
        as_json(seen["rows"])
        return
    table(
        ["client", "connected", "examples", "label", "invited", "used", "download", "training", "upload"],
        [
            (
                *(client["client"], "yes" if client["connected"] else "no"),
                *(client[name] for name in ("num_examples", "label", "invited", "used")),
                *(seconds(client[f"{name}_seconds"]) for name in ("download", "train", "upload")),
            )
            for client in seen["rows"]
        ],
        empty=f"nobody has joined run {seen['run']} yet",
    )


Name = Annotated[str, typer.Argument(metavar="NAME", help="The site's name; for an aggregator the number of its rank.")]
AsRole = Annotated[Role, typer.Option("--role", help="What the name is to be.", show_choices=False)]
Hours = Annotated[
    float,
    typer.Option(
        "--hours", metavar="H", help="How long the code can be used, at most 720.", callback=options.between(0.001, 720)
    ),
]


@app.command("invite")
def invite(
    name: Name,
    role: AsRole = Role.CLIENT,
    hours: Hours = 24.0,
    state: options.State = options.STATE,
    json: options.Json = False,
) -> None:
    """Print a join code, with which somebody becomes a member under this name, once: hand it over in confidence.

    It carries the coordinator's address, the fingerprint of its authority and a secret. An earlier code for the same
    name is void. A coordinator that is just starting is waited for.
    """
    from atoll.cli.looking import admin

    reply = admin.invite(state, role, name, hours * 3600)
    if json:
        as_json({"name": name, "role": str(role), "join_code": reply.join_code, "expires_at": reply.expires_at})
        return
    say(reply.join_code)

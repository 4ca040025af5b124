"""`atoll client ...`: who has taken part, and who may."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.faults import Commands
from atoll.cli.looking import history_of, run_of
from atoll.cli.printing import as_json, say, seconds, table
from atoll.protocol.identity.names import Role

if TYPE_CHECKING:
    from atoll.protocol.vocabulary import ClientId
    from atoll.server.membership import Member

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Who has taken part, and who may.")


@app.command("list")
def list_clients(
    run: options.Run = "",
    state: options.State = options.STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """List the clients that ever joined a run: who is connected, how fast each was, what it has done."""
    with history_of(state, database) as history:
        row = run_of(history, run)
        members, rounds = history.clients(row.run_id), history.rounds(row.run_id)
    invited = Counter(client_id for record in rounds for client_id in record.clients)
    used = Counter(c for record in rounds for c, client in record.clients.items() if client.used_in is not None)
    clients = [
        _summary(client_id, member) | {"invited": invited[client_id], "used": used[client_id]}
        for client_id, member in members.items()
    ]
    if json:
        as_json(clients)
        return
    table(
        ["client", "connected", "examples", "label", "invited", "used", "download", "training", "upload"],
        [
            (
                *(client["client"], "yes" if client["connected"] else "no"),
                *(client[name] for name in ("num_examples", "label", "invited", "used")),
                *(seconds(client[f"{name}_seconds"]) for name in ("download", "train", "upload")),
            )
            for client in clients
        ],
        empty=f"nobody has joined run {row.run_id} yet",
    )


def _summary(client_id: "ClientId", member: "Member") -> dict[str, Any]:
    return {
        "client": client_id,
        "connected": member.session is not None,
        "num_examples": member.profile.num_examples,
        "label": member.profile.label,
        "download_seconds": member.download_seconds,
        "train_seconds": member.train_seconds,
        "upload_seconds": member.upload_seconds,
    }


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
    from atoll.cli import admin

    reply = admin.invite(state, role, name, hours * 3600)
    if json:
        as_json({"name": name, "role": str(role), "join_code": reply.join_code, "expires_at": reply.expires_at})
        return
    say(reply.join_code)

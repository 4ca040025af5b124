"""`atoll client ...`: who has taken part."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import typer

from atoll.cli import options
from atoll.cli.faults import Commands
from atoll.cli.looking import history_of, run_of
from atoll.cli.printing import as_json, seconds, table

if TYPE_CHECKING:
    from atoll.protocol.vocabulary import ClientId
    from atoll.server.membership import Member

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Who has taken part.")


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

"""`atoll client revoke` and `atoll client members`: who may take part, and who no longer."""

from typing import Annotated

import typer

from atoll.cli import options
from atoll.cli.clients import app
from atoll.cli.printing import as_json, clock, note, table
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.names import Role

__all__ = ["app"]

TIMEOUT_S = 30.0

Name = Annotated[str, typer.Argument(metavar="NAME", help="The member; for an aggregator the number of its rank.")]
WhoseRole = Annotated[Role, typer.Option("--role", help="What the name is.", show_choices=False)]


@app.command("revoke")
def revoke(
    name: Name, role: WhoseRole = Role.CLIENT, state: options.State = options.STATE, json: options.Json = False
) -> None:
    """Let a member in no longer: its certificates and join codes count no more, and its open calls end within seconds.

    Its runs go on without it. A new join code for the same name makes it a member again.
    """
    from atoll.cli import admin

    request = pb.RevokeRequest(role=role, name=name)
    admin.ask(state, lambda it: it.Revoke(request, timeout=TIMEOUT_S))
    if json:
        as_json({"role": role, "name": name, "standing": "revoked"})
    else:
        note(f"{role} {name} is revoked")


@app.command("members")
def members(state: options.State = options.STATE, json: options.Json = False) -> None:
    """List who was invited, is a member, has let its certificate lapse, or is revoked."""
    from atoll.cli import admin

    reply: pb.ListMembersReply = admin.ask(state, lambda it: it.ListMembers(pb.ListMembersRequest(), timeout=TIMEOUT_S))
    rows = [
        {
            "role": row.role,
            "name": row.name,
            "standing": row.standing,
            "since": row.since,
            "expires_at": row.expires_at or None,
        }
        for row in reply.members
    ]
    if json:
        as_json(rows)
        return
    table(
        ["role", "name", "standing", "since", "expires"],
        [(row.role, row.name, row.standing, clock(row.since), clock(row.expires_at or None)) for row in reply.members],
        empty="nobody was invited yet: atoll client invite NAME",
    )

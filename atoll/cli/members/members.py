"""`atoll client revoke` and `atoll client members`: who may take part, and who no longer."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.members.clients import app
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
    from atoll.cli.looking import admin

    request = pb.RevokeRequest(role=role, name=name)
    before: pb.ListMembersReply = admin.ask(state, _list)
    admin.ask(state, lambda it: it.Revoke(request, timeout=TIMEOUT_S))
    known = {row.name: row.standing for row in before.members if row.role == role}
    if json:
        said = {"role": role, "name": name, "standing": "revoked"}
        as_json(said | {"was_known": name in known, "alike": alike(name, known)})
        return
    note(f"{role} {name} is revoked")
    if name not in known:
        note(unknown(role, name, known))


def alike(name: str, known: Mapping[str, str]) -> list[str]:
    """Those who may have been meant by a name that is none of the known ones, which come with their standing."""
    still_in = [other for other, standing in known.items() if standing != "revoked"]
    return [] if name in known else get_close_matches(name, still_in)


def unknown(role: Role, name: str, known: Mapping[str, str]) -> str:
    """That whoever was revoked is nobody that the coordinator knows."""
    close = alike(name, known)
    meant = f" Not revoked is {' or '.join(close)}: was that meant?" if close else ""
    return (
        f"but no {role} of this name was invited here or has a certificate from here: only certificates that were made "
        f"by hand for it count no more.{meant}"
    )


@app.command("members")
def members(state: options.State = options.STATE, json: options.Json = False) -> None:
    """List who was invited, is a member, has let its certificate lapse, or is revoked."""
    from atoll.cli.looking import admin

    reply: pb.ListMembersReply = admin.ask(state, _list)
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


def _list(admin: Any) -> Any:
    return admin.ListMembers(pb.ListMembersRequest(), timeout=TIMEOUT_S)

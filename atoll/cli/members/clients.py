"""`atoll client ...`: the clients of a run, and the members of a coordinator: invite, list, revoke."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.faults import Commands
from atoll.cli.printing import as_json, clock, note, say, seconds, shortened, table
from atoll.cli.runs.views import read_view
from atoll.protocol.identity.names import Role

app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="List the clients of a run; invite, list and revoke members."
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the site or person; for an aggregator the number of its rank.")
]
RoleOfName = Annotated[
    Role,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="Role of the name: client, operator, owner, auditor or aggregator.",
        show_choices=False,
    ),
]
Hours = Annotated[
    float,
    typer.Option(
        "--hours",
        metavar="H",
        help="Hours for which the join code is valid, at most 720.",
        callback=options.between(0.001, 720),
    ),
]


@app.command("list")
def list_clients(
    run: options.Run = "",
    state: options.State = options.STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """List the clients that ever joined a run: whether each can be invited and why not, its work, its last failure.

    `seen` is the newest event of a connection; a connected client is seen all the time.
    """
    seen = read_view("clients", state, database, run=run)
    if json:
        as_json(seen["rows"])
        return
    table(
        [
            *("client", "connected", "available", "examples", "label", "invited", "used"),
            *("download", "training", "upload", "seen", "version", "last failure"),
        ],
        [
            (
                *(client["client"], "yes" if client["connected"] else "no"),
                "yes" if client["available"] else shortened(client["why_not"]),
                *(client[name] for name in ("num_examples", "label", "invited", "used")),
                *(seconds(client[f"{name}_seconds"]) for name in ("download", "train", "upload")),
                *(clock(client["seen_at"]), client["software"], _last_failure(client["last_failure"])),
            )
            for client in seen["rows"]
        ],
        empty=f"no client has joined run {seen['run']} yet",
    )


def _last_failure(failure: Mapping[str, Any] | None) -> str:
    return "" if failure is None else f"{failure['reason']} at {clock(failure['at'])}"


@app.command("invite")
def invite(
    name: Name,
    role: RoleOfName = Role.CLIENT,
    hours: Hours = 24.0,
    state: options.State = options.STATE,
    json: options.Json = False,
) -> None:
    """Print a join code, which makes its bearer a member under this name, once: hand it over in confidence.

    It contains the coordinator's address, the fingerprint of its authority and a secret. An earlier code for the same
    name becomes invalid. The command waits for a coordinator that is starting.
    """
    from atoll.cli.runs import admin

    reply = admin.invite(state, role, name, hours * 3600)
    if json:
        as_json({"name": name, "role": str(role), "join_code": reply.join_code, "expires_at": reply.expires_at})
        return
    say(reply.join_code)


@app.command("revoke")
def revoke(
    name: Name, role: RoleOfName = Role.CLIENT, state: options.State = options.STATE, json: options.Json = False
) -> None:
    """Revoke a member: its certificates and join codes become invalid, and its open calls end within seconds.

    Its runs go on without it. A new join code for the same name makes it a member again.
    """
    from atoll.cli.runs import admin

    admin.check_member(role, name)
    known = {row.name: row.standing for row in admin.members(state).members if row.role == role}
    admin.revoke(state, role, name)
    if json:
        answer = {"role": role, "name": name, "standing": "revoked"}
        as_json(answer | {"was_known": name in known, "alike": similar_names(name, known)})
        return
    note(f"{role} {name} is revoked")
    if name not in known:
        note(unknown_name(role, name, known))


def similar_names(name: str, known: Mapping[str, str]) -> list[str]:
    """Return up to three names, not revoked, that an unknown name may stand for; `known` maps names to standings."""
    not_revoked = [other for other, standing in known.items() if standing != "revoked"]
    return [] if name in known else get_close_matches(name, not_revoked)


def unknown_name(role: Role, name: str, known: Mapping[str, str]) -> str:
    """Return the note that a revoked name was unknown to the coordinator, with similar names."""
    similar = similar_names(name, known)
    hint = f" Did you mean {' or '.join(similar)}, which is not revoked?" if similar else ""
    return (
        f"but no {role} of this name was invited or enrolled here: the only certificates that become invalid are those "
        f"made for it by hand.{hint}"
    )


@app.command("members")
def members(state: options.State = options.STATE, json: options.Json = False) -> None:
    """List the members and the standing of each.

    Standings: invited; member; lapsed, when the certificate has expired; revoked; void, when wrong secrets were tried
    with the join code. Lapsed and void names need a new join code.
    """
    from atoll.cli.runs import admin

    found = admin.members(state).members
    if json:
        as_json(
            [
                {
                    "role": row.role,
                    "name": row.name,
                    "standing": row.standing,
                    "since": row.since,
                    "expires_at": row.expires_at or None,
                }
                for row in found
            ]
        )
        return
    table(
        ["role", "name", "standing", "since", "expires"],
        [(row.role, row.name, row.standing, clock(row.since), clock(row.expires_at or None)) for row in found],
        empty="no member yet; invite one: atoll client invite NAME",
    )

"""`atoll client ...`: the clients of a run, and the members of a coordinator: invite, list, revoke."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from atoll.cli import completion, options
from atoll.cli.group import Commands
from atoll.cli.printing import as_json, clock, note, say, seconds, table
from atoll.ground.printable import shortened
from atoll.operations.place import STATE
from atoll.operations.views import read_pages, read_view
from atoll.protocol.identity.names import Role
from atoll.protocol.paging import COUNT_MAX, Paging

app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="List the clients of a run; invite, list and revoke members."
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the site or person; for an aggregator the number of its rank.")
]
Member = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Name of the site or person; for an aggregator the number of its rank.",
        autocompletion=completion.members,
    ),
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
MadeByHand = Annotated[
    bool,
    typer.Option(
        "--made-by-hand",
        help="Revoke a name that is in no list here, as its certificate was made by `atoll authority issue`.",
    ),
]


Only = Annotated[
    str,
    typer.Option(
        "--only", metavar="STATE", help="Print the clients only that are connected, away, or failed (their last work)."
    ),
]
Prefix = Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Print the clients only whose names begin so.")]
AfterName = Annotated[
    str, typer.Option("--after", metavar="NAME", help="Print the clients only that follow this name, in order.")
]
Count = Annotated[
    int | None,
    typer.Option(
        "--count",
        metavar="N",
        callback=options.between(1, COUNT_MAX),
        help="Print at most N clients, up to 1,000; a note names the rest.",
    ),
]


@app.command("list")
def list_clients(
    run: options.Run = "",
    only: Only = "",
    prefix: Prefix = "",
    after: AfterName = "",
    count: Count = None,
    state: options.State = STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """List the sites: who is connected, since when, its version and clock, until when its certificate is valid.

    Connections do not depend on a run: they are shown before, between and after runs. `since` is the begin of the
    connection, or the last sight of a client that is away; `clock` is the agent's clock less the coordinator's. `run`
    says whether a run (the newest, or --run) can invite the client, and why not; its work and its last failure follow.
    A name that two agents use at once is reported below the table, with both addresses (--json: `name_conflict`).

    A whole list reads every client. Limited by an option, it reads the pages of the names that it prints; of a run with
    more than 2,000 clients what it says of the run is then as of the end of the last round.
    """
    if count is None and not (only or prefix or after):
        seen = read_view("clients", state, database, run=run)
    else:
        paging = Paging(after=after, state=only, prefix=prefix)
        seen = read_pages("clients", state, database, run=run, paging=paging, most=count)
        if seen["next"] is not None:
            note(f"more clients follow: --after {seen['next']}")
    if json:
        as_json(seen["rows"])
        return
    table(
        [
            *("client", "connected", "since", "version", "clock", "certificate until", "run"),
            *("examples", "label", "invited", "used", "download", "training", "upload", "last failure"),
        ],
        [
            (
                *(client["client"], "yes" if client["connected"] else "no"),
                *(clock(client["connected_since"] or client["seen_at"]), client["software"]),
                *(_offset(client["clock_offset"]), _until(client)),
                "available" if client["available"] else shortened(client["why_not"]),
                *(client[name] for name in ("num_examples", "label", "invited", "used")),
                *(seconds(client[f"{name}_seconds"]) for name in ("download", "train", "upload")),
                _last_failure(client["last_failure"]),
            )
            for client in seen["rows"]
        ],
        empty="no client is invited or connected yet; invite one: atoll client invite NAME",
    )
    for client in seen["rows"]:
        if client["name_conflict"]:
            note(client["name_conflict"])


def _offset(seconds_ahead: float | None) -> str:
    """Format an agent's clock less the coordinator's; the delay of the line shows as less than a second behind."""
    return "-" if seconds_ahead is None else f"{seconds_ahead:+.1f} s"


def _until(client: Mapping[str, Any]) -> str:
    return clock(client["certificate_until"]) if client["certificate_until"] else client["standing"] or "-"


def _last_failure(failure: Mapping[str, Any] | None) -> str:
    return "" if failure is None else f"{failure['reason']} at {clock(failure['at'])}"


@app.command("invite")
def invite(
    name: Name,
    role: RoleOfName = Role.CLIENT,
    hours: Hours = 24.0,
    state: options.State = STATE,
    json: options.Json = False,
) -> None:
    """Print a join code, which makes its bearer a member under this name, once: hand it over in confidence.

    It contains the coordinator's address, the fingerprint of its authority and a secret. An earlier code for the same
    name becomes invalid. The command waits for a coordinator that is starting.
    """
    from atoll.operations import admin

    reply = admin.invite(state, role, name, hours * 3600)
    if json:
        as_json({"name": name, "role": str(role), "join_code": reply.join_code, "expires_at": reply.expires_at})
        return
    say(reply.join_code)


@app.command("revoke")
def revoke(
    name: Member,
    role: RoleOfName = Role.CLIENT,
    made_by_hand: MadeByHand = False,
    state: options.State = STATE,
    json: options.Json = False,
) -> None:
    """Revoke a member: its certificates and join codes become invalid, and its open calls end within seconds.

    Its runs continue without it. A new join code for the same name makes it a member again. A name that is not in
    `atoll client members` is refused, unless --made-by-hand says that it has a certificate all the same.
    """
    from atoll.operations.members import revoke_member

    is_known = revoke_member(state, role, name, made_by_hand=made_by_hand)
    if json:
        as_json({"role": role, "name": name, "standing": "revoked", "was_known": is_known})
        return
    note(f"{role} {name} is revoked")


@app.command("members")
def members(state: options.State = STATE, json: options.Json = False) -> None:
    """List the members with their status, also while the coordinator is stopped.

    Standings: invited; member; by hand, when `atoll authority issue` made the certificate and it was not renewed yet;
    lapsed, when the certificate has expired; revoked; void, when wrong secrets were tried with the join code. Lapsed
    and void names need a new join code. A certificate that an authority on another machine made is listed from its
    first renewal on.
    """
    from atoll.operations.members import members_of

    found = members_of(state)
    if json:
        as_json(found)
        return
    table(
        ["role", "name", "standing", "since", "expires"],
        [
            (*(row[name] for name in ("role", "name", "standing")), clock(row["since"]), clock(row["expires_at"]))
            for row in found
        ],
        empty="no member yet; invite one: atoll client invite NAME",
    )

"""The members of a coordinator: listed by it, or read from its state directory while no process listens; revoked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.ground.printable import instead_of
from atoll.operations import admin
from atoll.operations.faults import CommandError
from atoll.operations.place import is_elsewhere
from atoll.operations.reporter import note
from atoll.operations.views import reading
from atoll.protocol.identity.names import Role


def members_of(state: Path, database: str = "") -> list[dict[str, Any]]:
    """Return the members that the coordinator lists or, where none listens, those that the state directory has.

    Args:
        state: the state directory.
        database: the URL of its database, if the directory may be on another machine; empty: the directory's.

    Raises:
        CommandError: the coordinator refuses, or does not answer.
        OSError: the state directory is missing, damaged, or of a newer version of Atoll.
    """
    from atoll.server.identity.roster import stored_members
    from atoll.server.identity.setup import AUTHORITY, identity_folder

    if (not database and is_elsewhere(state)) or admin.is_listening(state):
        try:
            return [
                _row(row.role, row.name, row.standing, row.since, row.expires_at or None)
                for row in admin.members(state).members
            ]
        except CommandError as error:
            is_away = isinstance(error, admin.NoAnswer) and not isinstance(error, admin.NotTrusted)
            if is_elsewhere(state) or not admin.has_ended(state, admin.STOPPING_S if is_away else 0.0):
                raise
    with reading(state, database):
        stored = stored_members(state, identity_folder(state) / AUTHORITY, database)
    note(f"no coordinator listens at {state}: these are the members in its database; none can be connected now")
    return [
        _row(found.identity.role, found.identity.name, found.standing, found.since, found.expires_at)
        for found in stored
    ]


def _row(role: str, name: str, standing: str, since: float, expires_at: float | None) -> dict[str, Any]:
    return {"role": role, "name": name, "standing": standing, "since": since, "expires_at": expires_at}


def revoke_member(state: Path, role: Role, name: str, *, made_by_hand: bool = False) -> bool:
    """Revoke a member, and return whether it was in the list of members.

    Args:
        state: the coordinator's state directory.
        role: the role of the member.
        name: the name of the member.
        made_by_hand: also revoke a name that is in no list, as its certificate was made by `atoll authority issue`.

    Raises:
        CommandError: no member has this name, or as `admin.ask`.
    """
    admin.check_member(role, name)
    rows = admin.members(state).members
    is_known = any((row.role, row.name) == (role, name) for row in rows)
    if not is_known and not made_by_hand:
        raise CommandError(*unknown_member(role, name, {(Role(row.role), row.name): row.standing for row in rows}))
    admin.revoke(state, role, name)
    return is_known


def unknown_member(role: Role, name: str, standings: Mapping[tuple[Role, str], str]) -> tuple[str, str]:
    """Return the refusal to revoke a name that no member has, with the names that it may stand for.

    Args:
        role: the role of the name.
        name: the name.
        standings: the standing of each member.
    """
    others = [other for other, known in standings if known == name and other is not role]
    names = sorted(known for (other, known), standing in standings.items() if other is role and standing != "revoked")
    elsewhere = f"; {name} is {' and '.join(others)} here (--role ROLE)" if others else ""
    return (
        f"no {role} {name!r} was invited or enrolled here, so nothing is revoked{elsewhere}{instead_of(name, names)}",
        "a certificate that was made by hand (`atoll authority issue`) may be listed nowhere: "
        "`atoll client revoke --made-by-hand` revokes it all the same",
    )

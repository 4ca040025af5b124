"""The members of a coordinator: asked of it, or read from its state directory while no process listens."""

from pathlib import Path
from typing import Any

from atoll.operations import admin
from atoll.operations.faults import CommandError
from atoll.operations.place import is_elsewhere
from atoll.operations.reporter import note
from atoll.operations.views import reading


def members_of(state: Path) -> list[dict[str, Any]]:
    """Return the members that the coordinator lists or, where none listens, those that the state directory has.

    Raises:
        CommandError: the coordinator refuses, or does not answer.
        OSError: the state directory is missing, damaged, or of a newer version of Atoll.
    """
    from atoll.server.identity.roster import stored_members
    from atoll.server.identity.setup import AUTHORITY, identity_folder

    if is_elsewhere(state) or admin.is_listening(state):
        try:
            return [
                _row(row.role, row.name, row.standing, row.since, row.expires_at or None)
                for row in admin.members(state).members
            ]
        except CommandError as error:
            is_away = isinstance(error, admin.NoAnswer) and not isinstance(error, admin.NotTrusted)
            if is_elsewhere(state) or not admin.has_ended(state, admin.STOPPING_S if is_away else 0.0):
                raise
    with reading(state):
        stored = stored_members(state, identity_folder(state) / AUTHORITY)
    note(f"no coordinator listens at {state}: these are the members in its database; none can be connected now")
    return [
        _row(found.identity.role, found.identity.name, found.standing, found.since, found.expires_at)
        for found in stored
    ]


def _row(role: str, name: str, standing: str, since: float, expires_at: float | None) -> dict[str, Any]:
    return {"role": role, "name": name, "standing": standing, "since": since, "expires_at": expires_at}

"""The members of a coordinator: from the register, and from an authority's log of manually issued certificates."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from atoll.protocol.identity.names import Identity
from atoll.server.errors import StateUnusable
from atoll.server.identity.authority_server import BY_HAND, LOG
from atoll.server.identity.register import Member, Standing, in_order, members_in
from atoll.server.journal.binding import has_state, open_database
from atoll.server.journal.schema import check_version


def stored_members(state: Path, authority: Path, database: str = "") -> list[Member]:
    """Return the members of a state directory, read from its database; its coordinator need not run.

    Args:
        state: the state directory; with a database it may be on another machine.
        authority: the directory of its authority; a missing one has issued no certificate manually.
        database: the URL of the database; empty: the URL that the directory names.

    Raises:
        StateUnusable: `state` is not a state directory, or the database does not exist.
        DatabaseAway: the database server does not answer.
        StateTooNew: a later Atoll has written it.
        StoreCorrupted: the database is damaged.
    """
    if not database and not has_state(state):
        raise StateUnusable(f"{state} is not a state directory: there is no state.db in it")
    now = time.time()
    with closing(open_database(state, database, read_only=True)) as opened, opened.transaction() as connection:
        check_version(connection, state if opened.dialect == "sqlite" else opened.name)
        members = members_in(connection, now=now)
    return with_hand_made(members, authority, now=now)


def with_hand_made(members: Iterable[Member], authority: Path, *, now: float) -> list[Member]:
    """Add the identities that have only manually issued certificates, as logged in the authority's directory.

    A certificate of a revoked identity is not valid, so a revoked identity remains revoked.
    """
    found = {member.identity: member for member in members}
    newest: dict[Identity, Member] = {}
    for member in _hand_made(authority / LOG, now):
        known = newest.get(member.identity)
        if member.identity not in found and (known is None or (known.expires_at or 0) <= (member.expires_at or 0)):
            newest[member.identity] = member
    return in_order([*found.values(), *newest.values()])


def _hand_made(log: Path, now: float) -> Iterator[Member]:
    """Yield a member for each manually issued certificate; ignore a line truncated by a crash."""
    try:
        lines = log.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            if entry["why"] == BY_HAND:
                standing = Standing.LAPSED if entry["until"] <= now else Standing.BY_HAND
                yield Member(
                    Identity.parse(str(entry["identity"])), standing, float(entry["at"]), float(entry["until"])
                )

"""The clients of a run as rows: all of them, or a page in the order of their names."""

from collections.abc import Collection, Iterator
from typing import Any

from atoll.protocol.paging import Paging
from atoll.protocol.vocabulary import TERMINAL, ClientId, RunId, RunState
from atoll.server.identity.register import Member, Standing
from atoll.server.journal.rows import RunRow
from atoll.server.members.membership import Membership
from atoll.server.names.places import CLIENT
from atoll.server.names.presence import Presence
from atoll.server.rounds.waiting import why_not
from atoll.server.views import message_views
from atoll.server.views.attendance import attended
from atoll.server.views.history import History, MembersBehind, Numbered
from atoll.server.views.pages import CLIENTS_LOOKED_AT_MAX, after, chunks, fits_client, merged, page

Document = dict[str, Any]

CHUNK = 500
"""Number of clients whose facts are in memory at one time."""


def listed(history: History, row: RunRow | None, paging: Paging) -> Document:
    """Return the clients of a run, and those that have enrolled, are invited or connected, as rows.

    Args:
        history: the history of the state directory.
        row: the run; None: there is none yet.
        paging: the page.
    """
    over = "there is no run yet"
    if row is not None:
        over = f"the run is {row.state}" if row.state in TERMINAL or row.state is RunState.QUEUED else ""
    presence, members = history.presence(), history.members()
    of_messages = row is not None and row.config.is_of_messages
    behind = None
    if row is not None and not of_messages and paging.count is not None:
        behind = history.members_after(row.run_id, paging)
    if behind is not None and row is not None:
        rows = _walked(history, row.run_id, behind, Attendance(presence, members, over), paging)
        return page(rows, paging, fits_client(paging), CLIENTS_LOOKED_AT_MAX)
    known: list[Document] = []
    if row is not None:
        known = message_views.clients(history, row) if of_messages else _all(history, row.run_id)
    found = attended(known, presence, members, over)
    if paging.count is None:
        return {"rows": found}
    behind_rows = ((one["client"], one) for one in found if one["client"] > paging.after)
    return page(behind_rows, paging, fits_client(paging))


class Attendance:
    """Connected and enrolled clients, of which a page takes the ones that it shows.

    Args:
        presence: who is connected; None: not known here.
        members: the members of the coordinator.
        over: why the run invites no client; empty: it may.
    """

    def __init__(self, presence: Presence | None, members: Collection[Member], over: str) -> None:
        self._presence, self._over = presence, over
        self._connected = {each.client: each for each in (presence.clients if presence is not None else ())}
        self._members = {member.identity.name: member for member in members}

    def connected(self, paging: Paging) -> list[str]:
        """Return the connected clients of a page, and the ones behind it."""
        return after(self._connected, paging)

    def enrolled(self, paging: Paging) -> list[str]:
        """Return the members of a page, and the ones behind it, without the revoked ones."""
        gone = (Standing.REVOKED, Standing.VOID)
        return after((name for name, member in self._members.items() if member.standing not in gone), paging)

    @property
    def is_known(self) -> bool:
        """Return whether it is known here who is connected."""
        return self._presence is not None

    def rows(self, names: Collection[str], known: Collection[Document]) -> list[Document]:
        """Return the rows of some clients; `known`: the run's facts about those that it knows."""
        presence = self._presence
        if presence is not None:
            presence = Presence(tuple(self._connected[name] for name in names if name in self._connected))
        members = (self._members[name] for name in names if name in self._members)
        return attended(known, presence, members, self._over)


def _walked(
    history: History, run_id: RunId, behind: MembersBehind, attendance: Attendance, paging: Paging
) -> Iterator[Numbered]:
    """Yield the rows of a page of a run's clients and the ones behind it."""
    names: Iterator[ClientId]
    if paging.state == "connected" and attendance.is_known:
        names = merged(attendance.connected(paging))
    else:
        names = merged(behind.names(paging), attendance.connected(paging), attendance.enrolled(paging))
    size = CHUNK if paging.is_filtered else min(CHUNK, (paging.count or 0) + 1)
    for some in chunks(names, size):
        membership = behind.membership(some)
        known = _facts(history, run_id, membership)
        yield from ((row["client"], row) for row in attendance.rows(some, known))


def _all(history: History, run_id: RunId) -> list[Document]:
    """Return the facts about every member of a run."""
    membership, opened = history.membership(run_id), history.open_round(run_id)
    found = _facts(history, run_id, membership, is_whole=True)
    for row in found if opened is not None else ():
        assert opened is not None
        if (client := opened.clients.get(row["client"])) is not None:
            row["invited"] += 1
            row["used"] += client.used_in is not None
    return found


def _facts(history: History, run_id: RunId, membership: Membership, *, is_whole: bool = False) -> list[Document]:
    counts = history.participations(run_id, None if is_whole else membership.members)
    conflicts = {row["name"]: row["sentence"] for row in history.conflicts() if row["kind"] == CLIENT}
    found = []
    for client_id in sorted(membership.members):
        invited, used = counts.get(client_id, (0, 0))
        counted = {"invited": invited, "used": used, "name_conflict": conflicts.get(client_id, "")}
        found.append(_client(client_id, membership) | counted)
    return found


def _client(client_id: ClientId, membership: Membership) -> Document:
    """Return a client as a row: `why_not` says why it cannot be invited now, `seen_at` is its newest sign of life."""
    member = membership.members[client_id]
    trouble, is_connected = member.trouble, membership.is_connected(client_id)
    failure = None if trouble is None else {"reason": trouble.reason, "detail": trouble.detail, "at": trouble.at}
    return {
        "client": client_id,
        "connected": is_connected,
        "available": membership.is_available(client_id),
        "why_not": why_not(membership, client_id),
        "seen_at": member.seen_at or None,
        "software": member.software,
        "last_failure": failure,
        "evaluates": membership.evaluates(client_id),
        "num_examples": member.profile.num_examples,
        "label": member.profile.label,
        "download_seconds": member.download_seconds,
        "train_seconds": member.train_seconds,
        "upload_seconds": member.upload_seconds,
    }

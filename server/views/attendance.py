"""The clients of a coordinator as rows: who is connected, as the coordinator knows, and what a run knows of them."""

from collections.abc import Iterable
from typing import Any

from atoll.server.identity.register import Member, Standing
from atoll.server.names.presence import Presence

Document = dict[str, Any]

UNKNOWN: Document = {
    "available": False,
    "why_not": "has not joined",
    "seen_at": None,
    "software": "",
    "last_failure": None,
    "evaluates": True,
    "num_examples": 0,
    "label": "",
    "download_seconds": None,
    "train_seconds": None,
    "upload_seconds": None,
    "invited": 0,
    "used": 0,
    "name_conflict": "",
}
"""Row of a client that the run does not know."""


def attended(
    rows: Iterable[Document], presence: Presence | None, members: Iterable[Member], over: str = ""
) -> list[Document]:
    """Return a row for each client of a run, each member that has enrolled or was invited, and each connected client.

    Args:
        rows: the clients that the run knows, with the run's facts about each.
        presence: who is connected; None: not known here, so that the run's facts are used.
        members: the members of the coordinator.
        over: why the run invites no client, such as "the run is finished"; empty: it may.
    """
    known, standings = {row["client"]: row for row in rows}, {member.identity.name: member for member in members}
    connected = {each.client: each for each in (presence.clients if presence is not None else ())}
    gone = {name for name, member in standings.items() if member.standing in (Standing.REVOKED, Standing.VOID)}
    names = {*known, *connected, *(standings.keys() - gone)}
    found = []
    for name in sorted(names):
        row, here, member = known.get(name), connected.get(name), standings.get(name)
        is_connected = here is not None if presence is not None else bool(row and row["connected"])
        has_certificate = member is not None and member.standing is not Standing.INVITED
        until = member.expires_at if member is not None and has_certificate else None
        shown_until = here.certificate_until if here is not None else None
        says = {**UNKNOWN, **(row or {})}
        why = over or (says["why_not"] if row is None or not says["available"] else "")
        if is_connected and not over and why == "not connected":
            why = "has not joined"
        found.append(
            {
                **says,
                "client": name,
                "connected": is_connected,
                "connected_since": here.since if here is not None else None,
                "address": here.address if here is not None else "",
                "available": says["available"] and is_connected,
                "why_not": why or ("" if is_connected else "not connected"),
                "software": (here.software if here is not None else "") or says["software"],
                "clock_offset": here.clock_offset if here is not None else None,
                "certificate_until": max(until or 0.0, shown_until or 0.0) or None,
                "standing": str(member.standing) if member is not None else "",
            }
        )
    return found

"""The secure sums of a run's rounds by stage: which message of how many members has come, and why a sum has no result.

Pure.
"""

from collections.abc import Iterable
from typing import Any

from atoll.server.rounds.record import RoundRecord
from atoll.server.views.secure_sums import STEPS


def sums_of(records: Iterable[RoundRecord]) -> list[dict[str, Any]]:
    """Return a row for each secure sum of rounds, in their order, with the members that sent each message."""
    return [row for record in records for row in _of_round(record)]


def _of_round(record: RoundRecord) -> Iterable[dict[str, Any]]:
    by_session: dict[int, list[Any]] = {}
    for client in record.clients.values():
        if client.sum is not None:
            by_session.setdefault(client.sum.session, []).append(client.sum)
    for each in record.sums:
        members = by_session.get(each.session, [])
        yield {
            "round": record.round_id,
            "session": each.session,
            "attempt": each.attempt,
            "stage": each.stage,
            "members": each.num_members or len(members),
            "threshold": each.threshold,
            "sent": {
                field.removesuffix("_at"): sum(getattr(member, field) is not None for member in members)
                for field, _ in STEPS
            },
            "left": sum(bool(member.left) for member in members),
            "left_out": [str(name) for name in each.left_out],
            "wrong": [str(name) for name in each.wrong],
            "is_dropped": each.is_dropped,
            "detail": each.detail,
        }

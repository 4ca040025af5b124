"""The record of a round as one line of a table, in plain values. Pure."""

import math
from collections.abc import Sequence
from typing import Any

from atoll.protocol.vocabulary import Fate
from atoll.server.rounds.record import ClientRecord, RoundRecord


def summary(record: RoundRecord) -> dict[str, Any]:
    """Return the round as one line of a table, in plain values."""
    fates = {fate: sum(client.fate is fate for client in record.clients.values()) for fate in Fate}
    used = [client.num_examples for client in record.clients.values() if client.used_in == record.round_id]
    earlier = [*record.carried, *(row for row in record.buffer if row.round_id != record.round_id)]
    reason = record.abandon_reason or record.close_reason
    return {
        "round": record.round_id,
        "phase": str(record.phase),
        "base_version": record.base_version,
        "version": record.version,
        "wanted": record.cohort_size,
        "quorum": record.quorum,
        "candidates": record.num_candidates,
        "invited": len(record.clients),
        **{str(fate): fates[fate] for fate in Fate},
        "counted": 0 if record.version is None else record.num_in + len(record.carried),
        "carried_in": len(earlier),
        "too_old": len(record.too_old),
        "staleness": max((row.staleness for row in earlier), default=0),
        "num_examples": _total([*used, *(row.num_examples for row in earlier)]),
        "num_bytes": sum(client.num_bytes for client in record.clients.values()),
        "bytes_saved": sum(bytes_saved(client) for client in record.clients.values()),
        "opened_at": record.opened_at,
        "ended_at": record.ended_at,
        "seconds": None if record.ended_at is None else round(record.ended_at - record.opened_at, 3),
        "epsilon": None if record.charge is None else record.charge.epsilon,
        "clip_norm": record.clip_norm,
        "reason": str(reason) if reason else "",
        "detail": record.detail,
    }


def bytes_saved(client: ClientRecord) -> int:
    """Return the number of bytes that the codec saved on an accepted update."""
    return client.plain_bytes - client.num_bytes if client.plain_bytes else 0


def _total(weights: Sequence[float]) -> int | float:
    """Return the sum of weights, independent of their order."""
    total = math.fsum(weights)
    return int(total) if total.is_integer() else total

"""An exchange as one line of a table, in plain values. Pure."""

from collections import Counter
from typing import Any

from atoll.protocol.vocabulary import Fate
from atoll.server.exchanges.exchange import Exchange

Document = dict[str, Any]

FATES = (Fate.WAITING, Fate.REPORTED, Fate.FAILED, Fate.REFUSED, Fate.LOST, Fate.STRAGGLER, Fate.RELEASED)
"""Fates of a message, in the order of the table's columns."""

ERRORS = (Fate.FAILED, Fate.REFUSED, Fate.LOST)
"""Fates whose messages have an error instead of a reply."""


def summary(exchange: Exchange) -> Document:
    """Return an exchange as one line of a table, in plain values; `round` is its number, as for a round."""
    sent = exchange.sent
    fates = Counter(one.fate for one in sent)
    return {
        "round": exchange.number,
        "phase": "open" if exchange.is_open else "closed",
        "kinds": sorted({one.message.kind for one in sent}),
        "groups": sorted({one.message.group for one in sent if one.message.group}),
        "num_messages": len(sent),
        "nodes": len({one.message.client_id for one in sent}),
        **{str(fate): fates[fate] for fate in FATES},
        "missing": fates[Fate.STRAGGLER] + fates[Fate.RELEASED],
        "errors": dict(sorted(Counter(one.reason for one in sent if one.fate in ERRORS).items())),
        "bytes_down": sum(one.message.num_bytes for one in sent if one.delivered_at is not None),
        "bytes_up": sum(one.num_bytes for one in sent),
        "opened_at": exchange.opened_at,
        "ended_at": exchange.closed_at,
        "seconds": None if exchange.closed_at is None else round(exchange.closed_at - exchange.opened_at, 3),
        "reason": "" if exchange.close_reason is None else str(exchange.close_reason),
        "cut_off": exchange.is_void,
    }

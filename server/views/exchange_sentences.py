"""A closed or open exchange in plain sentences, and as JSON. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from atoll.ground.printable import conclusion, count_of, printable_size, some_of
from atoll.protocol.vocabulary import ClientId, CloseReason, Fate
from atoll.server.exchanges.exchange import Exchange, Sent
from atoll.server.exchanges.exchange_summary import summary
from atoll.server.views.reasons import explain_named

Document = dict[str, Any]

_CLOSES = {
    CloseReason.ALL_ANSWERED: "every message was answered",
    CloseReason.LINGER_OVER: "the quorum was reached and the linger time over",
    CloseReason.DEADLINE: "a deadline had passed",
}


_OF_FATES = {
    Fate.REPORTED: "replied",
    Fate.FAILED: "failed",
    Fate.REFUSED: "refused",
    Fate.LOST: "lost",
    Fate.STRAGGLER: "too late",
    Fate.RELEASED: "released",
}

NODES_MAX = 10
"""Largest number of nodes that are named."""


def exchange_document(exchange: Exchange) -> Document:
    """Return an exchange with its messages and its sentences."""
    return {
        "round_id": exchange.number,
        **{name: value for name, value in summary(exchange).items() if name != "round"},
        "sentences": sentences(exchange),
        "messages": [_message(one) for one in exchange.sent],
    }


def _message(one: Sent) -> Document:
    message = one.message
    return {
        "number": one.number,
        "client": message.client_id,
        "kind": message.kind,
        "group": message.group,
        "content": message.content,
        "num_bytes": message.num_bytes,
        "fate": one.fate,
        "reply": one.reply,
        "reply_bytes": one.num_bytes,
        "reason": one.reason,
        "detail": one.detail,
        "delivered_at": one.delivered_at,
        "ended_at": one.ended_at,
    }


def sentences(exchange: Exchange) -> list[str]:
    """Explain an exchange to an operator: the messages, the replies, and the cause of each missing reply."""
    found = [_headline(exchange)]
    if any(one.reply is not None for one in exchange.sent):
        found.append(_replies(exchange))
    found += [_without_reply(exchange, one) for one in exchange.sent if one.fate not in (Fate.REPORTED, Fate.WAITING)]
    if waiting := [one.message.client_id for one in exchange.waiting]:
        found.append(f"It waits for {_named(waiting)}.")
    return found


def _headline(exchange: Exchange) -> str:
    kinds = ", ".join(sorted({one.message.kind for one in exchange.sent}))
    nodes = count_of(len({one.message.client_id for one in exchange.sent}), "node")
    sent = f"Exchange {exchange.number} sent {count_of(len(exchange.sent), 'message')} ({kinds}) to {nodes}"
    if exchange.closed_at is None or exchange.close_reason is None:
        return f"{sent} and is open."
    after = f"{exchange.closed_at - exchange.opened_at:,.1f} s"
    if exchange.is_void:
        return f"{sent} and was cut off after {after}: the run ended. A resumed run sends it again."
    return f"{sent} and closed after {after}: {_CLOSES[exchange.close_reason]}."


def _replies(exchange: Exchange) -> str:
    replied = [one for one in exchange.sent if one.reply is not None]
    up = printable_size(sum(one.num_bytes for one in replied))
    names = _named([one.message.client_id for one in replied])
    return f"{count_of(len(replied), 'reply', 'replies')}, {up} in total, came from {names}."


def _without_reply(exchange: Exchange, one: Sent) -> str:
    where = f"{one.message.client_id} ({one.fate})"
    after = f"{(one.ended_at or exchange.opened_at) - exchange.opened_at:,.1f} s after the exchange had opened"
    if one.fate is Fate.STRAGGLER:
        upload = "its reply was still under way" if one.has_begun else "it had sent nothing"
        return f"{where}: {upload} at its deadline {after}."
    if one.fate is Fate.RELEASED:
        return f"{where}: it was told to stop {after}" + (f": {one.reason}." if one.reason else ".")
    detail = f": {said}" if (said := conclusion(one.detail)) else ""
    return f"{where}: {explain_named(one.fate, one.reason)} ({one.reason}), {after}{detail}."


def _named(names: list[Any]) -> str:
    return some_of(sorted(set(names)))


def nodes_in_words(nodes: Sequence[ClientId]) -> str:
    """Return the nodes that are connected as words."""
    listed = ", ".join(nodes[:NODES_MAX]) + (", ..." if len(nodes) > NODES_MAX else "")
    return f"{count_of(len(nodes), 'node is', 'nodes are')} connected" + (f" ({listed})" if nodes else "")


def sentence(exchange: Exchange) -> str:
    """Return an exchange as a sentence: the messages sent, and how it ended."""
    kinds = ", ".join(sorted({one.message.kind for one in exchange.sent}))
    sent = f"exchange {exchange.number}: {count_of(len(exchange.sent), 'message')} ({kinds})"
    if exchange.is_open:
        return f"{sent} sent"
    fates = Counter(one.fate for one in exchange.sent)
    ends = ", ".join(f"{fates[fate]} {text}" for fate, text in _OF_FATES.items() if fates[fate])
    seconds = (exchange.closed_at or exchange.opened_at) - exchange.opened_at
    return f"{sent} closed after {seconds:.2f} s ({exchange.close_reason}): {ends}"

"""The calls of a server program and the answers to them, as sent over its socket."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.protocol.vocabulary import Digest
from atoll.server.config.run import RunConfig
from atoll.server.exchanges.events import ExchangeAsked, Message
from atoll.server.exchanges.exchange import ANSWERED, Sent
from atoll.server.programs.contents import Contents
from atoll.task.programs.link import LATE
from atoll.tensors.layout import Piece

Json = dict[str, Any]


def order_of(config: RunConfig, run_number: int) -> Json:
    """Return the first line that a process of the program gets: the program and its settings."""
    order = {"program": config.program.main, "seed": config.seed, "options": config.options}
    return {**order, "run_number": run_number}


def asked(call: Json, contents: Contents) -> ExchangeAsked:
    """Return the event of a call that sends messages, whose contents then exist; raises as `Contents.keep`."""
    messages = []
    for node, kind, digest, group, ttl in call["messages"]:
        content = contents.keep(Digest(digest))
        messages.append(Message(node, kind, content.digest, content.manifest.num_bytes, group, float(ttl)))
    return ExchangeAsked(call["call"], tuple(messages), call["timeout"], call["in_order"], call["waits"])


def offered(call: Json, contents: Contents) -> Json:
    """Return the answer to a call that offers a content: its digest, and the path to write it to unless it exists."""
    pieces = tuple(Piece(t, d, tuple(o), tuple(n), s) for t, d, o, n, s in call["pieces"])
    digest, path = contents.offer(pieces, call["piece_bytes"])
    return {"digest": digest, "path": None if path is None else str(path)}


def reply_row(sent: Sent, place: int, path: Path | None = None, tensors: Sequence[tuple[str, int]] = ()) -> Json:
    """Return a program's view of a message: its reply, or the reason for none.

    Args:
        sent: the message.
        place: position of the message in the call that sent it, from 0.
        path: the file of the reply's bytes, one tensor after the other; None: no reply.
        tensors: name and size of each tensor [bytes].
    """
    message = sent.message
    row: Json = {"number": sent.number, "place": place, "ended_at": sent.ended_at or 0.0}
    row |= {"node": message.client_id, "kind": message.kind, "group": message.group}
    if path is None:
        return row | {"error": f"{sent.reason}: {sent.detail}" if sent.fate in ANSWERED else LATE}
    return row | {"error": "", "digest": sent.reply, "path": str(path), "tensors": list(tensors)}

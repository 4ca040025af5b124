"""The answers to the calls of a server program, as they travel over its socket."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.parallel.programs.link import LATE
from atoll.server.exchanges.exchange import ANSWERED, Sent

Json = dict[str, Any]


def reply_row(sent: Sent, place: int, path: Path | None = None, tensors: Sequence[tuple[str, int]] = ()) -> Json:
    """Return what a program learns of a message: its reply, or the reason for none.

    Args:
        sent: the message.
        place: of the message in the call that sent it, from 0.
        path: the file of the reply's bytes, one tensor after the other; None: there is none.
        tensors: name and size of each tensor [bytes].
    """
    message = sent.message
    row: Json = {"number": sent.number, "place": place, "ended_at": sent.ended_at or 0.0}
    row |= {"node": message.client_id, "kind": message.kind, "group": message.group}
    if path is None:
        return row | {"error": f"{sent.reason}: {sent.detail}" if sent.fate in ANSWERED else LATE}
    return row | {"error": "", "digest": sent.reply, "path": str(path), "tensors": list(tensors)}

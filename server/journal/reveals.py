"""The deletion of what opened secure sums: from the end of a round or an evaluation on, nothing needs it any more."""

from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, select, update

from atoll.protocol.vocabulary import RunId
from atoll.server.journal import checksums
from atoll.server.journal.codec import decode_event, encode_event
from atoll.server.journal.schema import JOURNAL
from atoll.server.rounds.session_events import MaskedCame, SharesRevealed

KINDS = (SharesRevealed.__name__, MaskedCame.__name__)
"""The events whose content is deleted: shares, and the masked words of an evaluation that they have opened."""


def forget_reveals(connection: Connection, run_id: RunId, seq: int) -> None:
    """Replace the content of these events in the entries up to `seq`; a replay takes them for arrived ones."""
    of_run = (JOURNAL.c.run_id == run_id) & JOURNAL.c.kind.in_(KINDS) & (JOURNAL.c.seq <= seq)
    for row in connection.execute(select(JOURNAL).where(of_run)).all():
        event = decode_event(row.kind, row.body, where=f"run {run_id}, entry {row.seq}")
        if event.content:
            connection.execute(
                update(JOURNAL).where(of_run, JOURNAL.c.seq == row.seq).values(**_without_content(row, event))
            )


def _without_content(row: Any, event: MaskedCame | SharesRevealed) -> dict[str, object]:
    kind, body = encode_event(replace(event, content=""))
    return {"body": body, "checksum": checksums.of_entry(row.seq, row.at, kind, body)}

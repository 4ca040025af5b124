"""The spans of a round, from its record as `atoll round show --json` has it. Pure.

Instants are those of the record. A client reports the durations of its download and training: the training ends where
the upload began, and the download where the training began.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.protocol.trace_ids import INVITATION, ROUND, span_id, trace_id
from atoll.telemetry.instruments import RUN

SPANS: Sequence[tuple[str, str]] = (
    (ROUND, "a round from its opening to its end; an error if it was abandoned"),
    ("selection", "from the opening to the draw of the cohort"),
    (INVITATION, "of one client, from the invitation to its fate; an error if it failed, refused or was lost"),
    ("download", "the client's download of the version, as it reports it"),
    ("train", "the client's training, as it reports it"),
    ("upload", "from the first byte of the client's update to its fate"),
    ("aggregation", "from the closing of the round to its commit"),
)
"""Name and meaning of each span; the last three of a client are parts of its invitation."""

AGENT_SPANS: Sequence[tuple[str, str]] = (
    ("agent.load", "from the agent's work on an invitation, the version downloaded, until its worker trains"),
    ("agent.train", "the training; of one that fails with what was before it, and an error"),
    ("agent.spool", "the storing of the update in the spool, encoded if it is for a secure sum"),
    ("agent.upload", "from the first attempt at the upload to the coordinator's answer"),
)
"""Name and meaning of each span that a site's agent sends, a part of its invitation; see `agent_spans`."""

BAD_FATES = ("failed", "refused", "lost")


@dataclass(frozen=True, slots=True)
class Span:
    """One span of a trace."""

    name: str
    trace: int
    id: int
    parent: int
    """Id of the enclosing span; 0: none."""
    begin: float
    """Instants [s since the epoch]."""
    end: float
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    error: str | None = None
    """What went wrong; None: nothing."""


def spans_of(run_id: str, number: int, record: Mapping[str, Any]) -> Iterator[Span]:
    """Yield the spans of a round that has ended.

    Args:
        run_id: the run.
        number: the run number.
        record: the record of the round.
    """
    round_id, begin, end = record["round_id"], record["opened_at"], record["ended_at"]
    trace, root = trace_id(number, run_id, round_id), span_id(number, run_id, round_id, ROUND)
    reason = record["abandon_reason"] or record["close_reason"] or ""
    about: dict[str, str | int | float] = {RUN: run_id, "atoll.round.number": round_id}
    facts = {"atoll.round.outcome": record["phase"], "atoll.round.reason": reason}
    facts |= {"atoll.round.base_version": record["base_version"], "atoll.round.invited": len(record["clients"])}
    facts |= {} if record["version"] is None else {"atoll.round.version": record["version"]}
    fault = str(reason) if record["phase"] == "abandoned" else None
    yield Span(ROUND, trace, root, 0, begin, end, about | facts, fault)

    def part(name: str, begin: float, end: float) -> Span:
        return Span(name, trace, span_id(number, run_id, round_id, name), root, begin, max(begin, end), about)

    if record["drawn_at"] is not None:
        yield part("selection", begin, record["drawn_at"])
    for client_id, row in sorted(record["clients"].items()):
        yield from _of_client(
            Span(INVITATION, trace, root, 0, begin, end, about), (number, run_id, round_id), client_id, row
        )
    if record["closed_at"] is not None and record["phase"] == "committed":
        yield part("aggregation", record["closed_at"], end)


def _of_client(around: Span, place: tuple[int, str, int], client_id: str, row: Mapping[str, Any]) -> Iterator[Span]:
    """Yield a client's invitation and its parts; `around` has the trace, the round's span and its attributes."""
    of_client = span_id(*place, INVITATION, client_id)
    begin, end = row["invited_at"], row["fate_at"] or around.end
    end = max(begin, end)
    about = {**around.attributes, "atoll.client.name": client_id}
    facts = {"atoll.invitation.fate": row["fate"], "atoll.invitation.reason": row["reason"]}
    facts |= {"atoll.update.size": row["num_bytes"]}
    error = (row["reason"] or row["fate"]) if row["fate"] in BAD_FATES else None
    yield Span(INVITATION, around.trace, of_client, around.id, begin, end, about | facts, error)

    def part(name: str, start: float, stop: float) -> Span:
        inside = min(max(start, begin), end), min(max(stop, begin), end)
        return Span(name, around.trace, span_id(*place, name, client_id), of_client, *inside, about)

    upload = row["upload_begun_at"]
    if row["train_seconds"] or row["download_seconds"]:
        trained = end if upload is None else upload
        start = trained - row["train_seconds"]
        yield part("download", start - row["download_seconds"], start)
        yield part("train", start, trained)
    if upload is not None:
        yield part("upload", upload, end)

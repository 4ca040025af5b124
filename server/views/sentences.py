"""The record of a round in plain sentences, and as JSON. Pure."""

import json
from typing import Any

from atoll.ground.printable import conclusion, lines_of, printable_size, some_of
from atoll.protocol.vocabulary import CloseReason, Fate, Phase, RejectReason
from atoll.server.journal.codec import encode_record
from atoll.server.rounds.record import UPDATE_LOST, CarriedRecord, ChargeRecord, ClientRecord, Outage, RoundRecord
from atoll.server.rounds.round_summary import bytes_saved
from atoll.server.rounds.waiting import retry_of
from atoll.server.views.reasons import explain, explain_named
from atoll.server.views.secure_sums import member_sentence, sum_sentences


def sentences(record: RoundRecord) -> list[str]:
    """Explain a round to an operator: one sentence for each decision, with its reason."""
    found = [_headline(record)]
    if record.clients:
        found.append(_invitation(record))
    found += (_client(record, client_id, client) for client_id, client in sorted(record.clients.items()))
    found += sum_sentences(record)
    found += (_carried(carried, record.base_version) for carried in record.carried)
    found += (_in_buffer(row) for row in record.buffer)
    found += [_capped(record)] if record.capped else []
    found += [_charged(record.charge)] if record.charge is not None else []
    found += [f"Updates are clipped to norm {record.clip_norm:.6g}."] if record.clip_norm is not None else []
    if record.too_old:
        found.append(_too_old(record))
    if record.superseded:
        found.append(_superseded(len(record.superseded)))
    found += map(_outage, record.outages)
    if any(client.plain_bytes > client.num_bytes for client in record.clients.values()):
        found.append(_saved(record))
    return found


def as_json(record: RoundRecord) -> dict[str, Any]:
    """Return all fields of the record, and its sentences."""
    fields: dict[str, Any] = json.loads(encode_record(record))
    for client_id, client in record.clients.items():
        if client.mesh:
            fields["clients"][client_id]["mesh"] = client.mesh.document
    return {**fields, "sentences": sentences(record)}


# ---------------------------------------------------------------- the round


def _headline(record: RoundRecord) -> str:
    start = f"Round {record.round_id} started from version {record.base_version}"
    if record.ended_at is not None:
        after = f"after {_seconds(record.ended_at - record.opened_at)}"
        if record.phase is Phase.COMMITTED:
            return f"{start} and was committed as version {record.version} {after}: {_why_closed(record)}."
        assert record.abandon_reason is not None
        detail = f" ({conclusion(record.detail)})" if record.detail else ""
        then = f"; {then}" if (then := retry_of(record)) else ""
        return f"{start} and was abandoned {after}: {explain(record.abandon_reason)}{detail}{then}."
    if record.phase is Phase.SECURING:
        return f"{start} and is opening its secure sums: {explain(record.close_reason or CloseReason.ENOUGH)}."
    if record.phase is Phase.AGGREGATING:
        return f"{start} and is being aggregated: {_why_closed(record)}."
    if record.phase is Phase.COLLECTING and record.mode != "sync":
        are = "is" if len(record.buffer) == 1 else "are"
        return f"{start} and is filling its buffer: {_wanted(record)} {are} in (quorum {record.quorum})."
    if record.phase is Phase.COLLECTING:
        assert record.deadline is not None
        assert record.drawn_at is not None
        until = _seconds(record.deadline - record.drawn_at)
        are = "is" if record.num_reported == 1 else "are"
        return f"{start} and is collecting for {until}: {_wanted(record)} {are} in (quorum {record.quorum})."
    return f"{start} and is waiting for clients: {record.num_needed_to_draw} must be connected."


def _wanted(record: RoundRecord) -> str:
    return f"{record.num_in} of the {record.cohort_size} wanted {_plural(record.cohort_size, 'update')}"


def _why_closed(record: RoundRecord) -> str:
    """Return the reason why the round closed, with the numbers of that decision."""
    late = f" and {_count(len(record.carried), 'late update')} of earlier rounds" if record.carried else ""
    if record.close_reason is CloseReason.ENOUGH:
        return f"{_wanted(record)}{late} {_was(record.num_in + len(record.carried))} in"
    assert record.close_reason is not None
    if record.mode != "sync" and record.close_reason in _OF_A_BUFFER:
        return f"{_OF_A_BUFFER[record.close_reason]}, with {_wanted(record)} (quorum {record.quorum})"
    return f"{explain(record.close_reason)}, with {_wanted(record)}{late} (quorum {record.quorum})"


_OF_A_BUFFER = {
    CloseReason.ALL_ANSWERED: "no client trained any more, and no other could be invited",
    CloseReason.DEADLINE: "the time to fill the buffer was over",
}


def _invitation(record: RoundRecord) -> str:
    names = sorted(record.clients)
    listed = some_of(names)
    if record.mode != "sync":
        return f"{_count(len(names), 'client')} {_was(len(names))} invited while its buffer filled: {listed}."
    available = f"{record.num_candidates} available {_plural(record.num_candidates, 'client')}"
    return f"{len(names)} of {available} {_was(len(names))} invited: {listed}."


def _carried(carried: CarriedRecord, base_version: int) -> str:
    age = "of the same version" if carried.staleness == 0 else f"{_count(carried.staleness, 'version')} old"
    age += f", trained from version {base_version - carried.staleness}"
    examples = _count(carried.num_examples, "example")
    what = f"the late update of round {carried.round_id} by {carried.client_id} ({examples}, {age})"
    weight = "its full weight" if carried.scale == 1 else f"{carried.scale:.3g} of its weight"
    return f"Carried in: {what}, which counts with {weight}."


def _capped(record: RoundRecord) -> str:
    names = sorted(record.capped)
    listed = some_of(f"{name} ({record.capped[name]:.6g})" for name in names)
    return f"Capped by max_share: the {_plural(len(names), 'weight')} of {listed} counted as {record.weight_cap:.6g}."


def _charged(charge: ChargeRecord) -> str:
    of = f"epsilon {charge.epsilon:.6g} of {charge.epsilon_max:g} at delta {charge.delta:g}"
    who = f"{_count(charge.clients, 'client')} for a private sum"
    if charge.charges > charge.clients:
        who += f", {charge.charges} times in all, as each attempt counts"
    return f"Charged: {who}; the most used client has spent {of} in {_count(charge.uses, 'use')}."


def _in_buffer(row: CarriedRecord) -> str:
    age = "fresh" if row.staleness == 0 else f"{_count(row.staleness, 'version')} old"
    what = f"the update of round {row.round_id} by {row.client_id} ({_count(row.num_examples, 'example')}, {age})"
    return f"In the buffer: {what}, scaled by {row.scale:.3g}."


def _too_old(record: RoundRecord) -> str:
    listed = some_of(
        f"{row.client_id} (of round {row.round_id}, {_count(row.staleness, 'version')} old)" for row in record.too_old
    )
    number = len(record.too_old)
    return f"{_count(number, 'invitation')} ended here, because the work was too old to count: {listed}."


def _superseded(number: int) -> str:
    of, its = ("its client", "a newer one") if number == 1 else ("their clients", "newer ones")
    return f"{_count(number, 'late update')} of earlier rounds {_was(number)} not used: {of} sent {its} in this round."


def _saved(record: RoundRecord) -> str:
    accepted = [client for client in record.clients.values() if client.plain_bytes]
    plain, saved = sum(client.plain_bytes for client in accepted), sum(map(bytes_saved, accepted))
    return f"The codec saved {printable_size(saved)} of {printable_size(plain)} ({_percent(saved / plain)})."


def _outage(outage: Outage) -> str:
    text = f"The coordinator was down for {_seconds(outage.seconds)}; the deadline moved by {_seconds(outage.extended)}"
    return f"{text}, as far as outage_max allows." if outage.extended < outage.seconds else f"{text}."


# ---------------------------------------------------------------- the clients


def _client(record: RoundRecord, client_id: str, client: ClientRecord) -> str:
    text = f"{client_id} ({client.fate}): {_FATES[client.fate](record, client)}"
    if client.num_reconnects:
        text += f"; it had reconnected {_times(client.num_reconnects)}"
    return f"{text}{member_sentence(client)}{_use(record, client)}."


def _reported(record: RoundRecord, client: ClientRecord) -> str:
    return f"its update was accepted {_since_invitation(client)}{_what_it_sent(client)}"


def _late(record: RoundRecord, client: ClientRecord) -> str:
    if client.deadline is not None:
        return _gave_up(record, client)
    text = f"its upload arrived {_how_late(record, client)} and was refused"
    is_plain = client.reason == RejectReason.TOO_LATE and client.detail.endswith("had closed")  # as `text` says
    return f"{text} ({client.reason})" if is_plain else f"{text}: {_given_up(client)}"


def _kept(record: RoundRecord, client: ClientRecord) -> str:
    text = f"its upload arrived {_how_late(record, client)} and was kept for the next committed round"
    return f"{text}{_what_it_sent(client)}"


def _gave_up(record: RoundRecord, client: ClientRecord) -> str:
    if client.reason == UPDATE_LOST:
        again = "; if it arrives again in time, it counts" if record.ended_at is None else ""
        return f"its update was {client.detail}, {_since_invitation(client)}{again}"
    did = {Fate.FAILED: "it gave up", Fate.LOST: "it was given up"}.get(client.fate, "its update was refused")
    rest = f"; it was then not invited for {_seconds(client.rest)}" if client.rest else ""
    return f"{did} {_since_invitation(client)}: {_given_up(client)}{rest}"


def _straggler(record: RoundRecord, client: ClientRecord) -> str:
    ended = "was abandoned" if record.phase is Phase.ABANDONED else "closed"
    upload = "its upload was still under way" if client.upload_begun_at is not None else "it had sent nothing"
    learnt = f"; it said later: {_given_up(client)}" if client.reason else ""
    if client.deadline is not None:
        return f"{upload} at its deadline {_since_invitation(client)}{learnt}"
    return f"{upload} when the round {ended} {_since_invitation(client)}{learnt}"


def _released(record: RoundRecord, client: ClientRecord) -> str:
    learnt = f"; it said later: {_given_up(client)}" if client.reason else ""
    return f"it was told to stop {_since_invitation(client)}, as its update was no longer needed{learnt}"


def _waiting(record: RoundRecord, client: ClientRecord) -> str:
    text = "its upload is under way" if client.upload_begun_at is not None else "it has not reported yet"
    return f"{text}; its connection is down" if client.disconnected_at is not None else text


def _joined(record: RoundRecord, client: ClientRecord) -> str:
    text = "its update is encoded, and it takes part in a secure sum"
    return f"{text}; its connection is down" if client.disconnected_at is not None else text


_FATES = {
    Fate.WAITING: _waiting,
    Fate.JOINED: _joined,
    Fate.REPORTED: _reported,
    Fate.FAILED: _gave_up,
    Fate.REFUSED: _gave_up,
    Fate.LOST: _gave_up,
    Fate.STRAGGLER: _straggler,
    Fate.RELEASED: _released,
    Fate.LATE: _late,
    Fate.CARRIED: _kept,
}


def _use(record: RoundRecord, client: ClientRecord) -> str:
    """Return the use of an accepted update, unless it counted in the round that it was sent for."""
    if client.unused_because and client.reason != UPDATE_LOST:
        return f"; no model contains it: {client.unused_because}"
    if client.used_in is not None and client.used_in != record.round_id:
        return f"; it counts in round {client.used_in}"
    return ""


def _what_it_sent(client: ClientRecord) -> str:
    if client.sum is not None:
        return f": {printable_size(client.num_bytes)}, masked"
    work = "all of the requested work" if client.work == 1 else f"{_percent(client.work)} of the requested work"
    sent = f": {_count(client.num_examples, 'example')}, {work}, {printable_size(client.num_bytes)}"
    if client.steps:
        sent += f", {_count(client.steps, 'step')}"
    if client.train_seconds:
        sent += f", {_seconds(client.train_seconds)} of training"
    if client.mesh:
        sent += f" on {client.mesh}"
    return sent


def _since_invitation(client: ClientRecord) -> str:
    return f"{_seconds(client.fate_at - client.invited_at)} after the invitation"


def _how_late(record: RoundRecord, client: ClientRecord) -> str:
    """Return the delay after the end of the round, or after its deadline if the round was in the grace period."""
    since = record.closed_at or record.ended_at
    if since is not None and client.fate_at >= since:
        ended = "had been abandoned" if record.closed_at is None else "had closed"
        return f"{_seconds(client.fate_at - since)} after the round {ended}"
    return f"{_seconds(client.fate_at - (record.deadline or client.fate_at))} after the deadline"


def _given_up(client: ClientRecord) -> str:
    """Return the reason for a client's end in words, with its name in the vocabulary and the detail."""
    words = explain_named(client.fate, client.reason)
    return f"{words} ({client.reason}){_after_colon(client.detail)}"


def _after_colon(detail: str) -> str:
    """Return a message of another machine as the end of a sentence; several lines are indented below it."""
    lines = lines_of(detail)
    if len(lines) > 1:
        return ":" + "".join(f"\n    {line}" for line in lines)
    return f": {lines[0].strip().rstrip('.')}" if lines else ""


# ---------------------------------------------------------------- the numbers


def _plural(number: float, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"


def _count(number: float, noun: str) -> str:
    digits = format(number, "g") if isinstance(number, float) else format(number, ",")
    return f"{digits} {_plural(number, noun)}"


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"

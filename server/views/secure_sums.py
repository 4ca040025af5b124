"""Secure sums in words and as rows: the lines of a run's log, the sentences of a round's record, the stages. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from atoll.ground.printable import conclusion, count_of
from atoll.protocol.secure.messages import Boxes, Opening, Question, Roster, Survivors
from atoll.protocol.vocabulary import ClientId, FailureReason, Fate, RoundId
from atoll.server.rounds.events import (
    Abandon,
    Aggregate,
    Effect,
    Event,
    Invite,
)
from atoll.server.rounds.record import FAILED, OPENED, ClientRecord, MemberRecord, RoundRecord, SumRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.session_events import KeysCame, OpeningFailed, SessionLeft, SumOpened, TellMember

STEPS = (
    ("keys_at", "keys"),
    ("shares_at", "shares"),
    ("masked_at", "its masked update"),
    ("signed_at", "its signature"),
    ("revealed_at", "its reveal"),
)
"""The messages of a member in their order, by the fields of its record."""

_OF_QUESTION: dict[type[Question], str] = {
    Roster: "its members exchange shares",
    Boxes: "its members send masked updates",
    Survivors: "its survivors are told, and sign them",
    Opening: "its members reveal what opens the sum",
}


def session_lines(machine: RunMachine, event: Event, effects: tuple[Effect, ...]) -> Iterator[str]:
    """Yield the lines of the log about the sessions of a round or an evaluation, for one event and its effects."""
    match event:
        case KeysCame(client_id, round_id, session, attempt, purpose="evaluation"):
            again = f", attempt {attempt}" if attempt > 1 else ""
            yield f"version {round_id}: {client_id} adds its metrics to the secure sum of session {session}{again}"
        case KeysCame(client_id, round_id, session, attempt):
            record = machine.record_of(round_id)
            row = record.clients.get(client_id) if record is not None else None
            if row is not None and row.fate is Fate.JOINED and row.sum is not None and row.sum.keys_at is not None:
                again = f", attempt {attempt}" if attempt > 1 else ""
                yield f"round {round_id}: {client_id} takes part in the secure sum of session {session}{again}"
        case SessionLeft(client_id, _, session, _, reason, detail):
            why = f": {conclusion(detail)}" if detail else ""
            yield f"{_work(event)}: {client_id} has left session {session}: {reason}{why}"
        case SumOpened(_, session, _, wrong):
            named = f"; wrong shares were revealed by {', '.join(wrong)}" if wrong else ""
            dropped = f", and counts nowhere: {event.fault}" if event.fault else ""
            yield f"{_work(event)}: session {session}: its sum is open{dropped}{named}"
        case OpeningFailed(_, session, _, detail):
            yield f"{_work(event)}: session {session}: its sum is not open yet: {detail}"
    yield from _told(effects)
    yield from _again(machine, effects)
    if isinstance(event, KeysCame | SessionLeft | SumOpened | OpeningFailed) or effects:
        yield from _ended(machine, effects)


def _work(of: SessionLeft | SumOpened | OpeningFailed | TellMember) -> str:
    return f"{'version' if of.purpose == 'evaluation' else 'round'} {of.round_id}"


def _told(effects: tuple[Effect, ...]) -> Iterator[str]:
    told: dict[tuple[int, type[Question]], list[TellMember]] = {}
    for effect in effects:
        if isinstance(effect, TellMember):
            told.setdefault((effect.session, type(effect.question)), []).append(effect)
    for (session, kind), tellings in told.items():
        if len(tellings) < 2:
            continue  # repeated for a member that has connected again
        first = tellings[0]
        threshold = f", {first.question.threshold} of which open it" if isinstance(first.question, Roster) else ""
        members = count_of(len(tellings), "member")
        asked = _OF_QUESTION[kind] if first.purpose == "update" else _OF_QUESTION[kind].replace("updates", "metrics")
        yield f"{_work(first)}: session {session}: {members}{threshold}: {asked}"


def _again(machine: RunMachine, effects: tuple[Effect, ...]) -> Iterator[str]:
    """Yield a line for each further attempt at a sum."""
    asked: dict[tuple[RoundId, int], list[int]] = {}
    for effect in effects:
        if isinstance(effect, Invite) and effect.sum is not None and effect.sum.attempt > 1:
            asked.setdefault((effect.round_id, effect.sum.session), []).append(effect.sum.attempt)
    for (round_id, session), attempts in asked.items():
        record = machine.record_of(round_id)
        if len(attempts) < 2 or record is None:
            continue  # repeated for a member that has connected again
        each = record.sums[session]
        without = f" without {_listed(each.left_out)}" if each.left_out else ""
        members = count_of(len(attempts), "member")
        yield f"round {round_id}: session {session}: attempt {attempts[0]} among {members}{without} ({each.detail})"


def _ended(machine: RunMachine, effects: tuple[Effect, ...]) -> Iterator[str]:
    """Yield a line for each sum that has no result, once the round has closed them all."""
    rounds = {effect.round_id for effect in effects if isinstance(effect, Aggregate | Abandon)}
    for round_id in sorted(rounds):
        record = machine.record_of(round_id)
        for each in record.sums if record is not None else ():
            if each.stage == FAILED:
                yield f"round {round_id}: session {each.session} has no sum: {each.detail}"


# ---------------------------------------------------------------- the record


def sum_sentences(record: RoundRecord) -> Iterator[str]:
    """Yield a sentence about each secure sum of a round."""
    for each in record.sums:
        names = [
            c for c, row in sorted(record.clients.items()) if row.sum is not None and row.sum.session == each.session
        ]
        yield f"Session {each.session} ({', '.join(names)}): {_sum(each)}."
        yield from (_left_out(each, name) for name in each.left_out)
    for name, times in sorted(record.only_dropped.items()):
        yield (
            f"{name} rests: in {count_of(times, 'round')} in a row the sum with its update was dropped for what was "
            f"added. If that repeats, `atoll client revoke {name}` after a talk with its operator."
        )


def _refusals_of(each: SumRecord, name: ClientId) -> tuple[list[ClientId], list[ClientId]]:
    """Return the members that have refused one, and those that it has refused, sorted."""
    by = {refusal.by for refusal in each.refusals if name in refusal.of}
    return sorted(by), sorted({other for refusal in each.refusals if refusal.by == name for other in refusal.of})


def _left_out(each: SumRecord, name: ClientId) -> str:
    """Return a sentence about a member that was left out: who refused it or was refused, why, and the way out."""
    by, of = _refusals_of(each, name)
    said = next(refusal for refusal in each.refusals if name in refusal.of or (not by and refusal.by == name))
    what = f"{_listed(by)} refused it" if by else f"it refused {_listed(of)}"
    trusted, at = (name, by) if by else (of[0], [name])
    way = f"`atoll site trust {trusted} FINGERPRINT` at {_listed(at)}, as the operator of {trusted} reads it out"
    same = f", and the same for {_listed(of[1:])}" if not by and len(of) > 1 else ""
    return f"{name} was left out: {what} ({said.by}: {conclusion(said.detail)}); if that is a mistake: {way}{same}."


def _sum(each: SumRecord) -> str:
    attempt = f", attempt {each.attempt}" if each.attempt > 1 else ""
    needed = (
        f"{each.threshold} of {count_of(each.num_members, 'member')} open it, by secure.threshold"
        if each.num_members
        else ""
    )
    if each.is_dropped:
        return f"its sum was opened and counts in no version{attempt}: {each.detail}"
    if each.stage == FAILED:
        return f"it has no sum: {each.detail}"
    if each.stage == OPENED:
        wrong = f"; wrong shares were revealed by {', '.join(each.wrong)}" if each.wrong else ""
        return f"its sum was opened{attempt} ({needed}){wrong}"
    before = f" ({each.detail})" if each.detail else ""
    return f"{each.stage}{attempt}{f', {needed}' if needed else ''}{before}"


def member_sentence(client: ClientRecord) -> str:
    """Return the end of a sentence: what a client has sent in its session, and why not the rest; empty: none."""
    member = client.sum
    if member is None:
        return ""
    sent = [name for field, name in STEPS if getattr(member, field) is not None]
    text = f"it has sent {_listed(sent)}" if sent else "it has sent no keys"
    return f"; session {member.session}: {text}{_why_not(member)}"


def _why_not(member: MemberRecord) -> str:
    if not member.left:
        return ""
    reason, _, detail = member.left.partition(": ")
    lost = reason == FailureReason.SESSION_LOST
    return f", and left: {'its agent was restarted' if lost else detail or reason}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# ---------------------------------------------------------------- the stages


def sums_of(records: Iterable[RoundRecord]) -> list[dict[str, Any]]:
    """Return a row for each secure sum of rounds, in their order, with the members that sent each message."""
    return [row for record in records for row in _sums_of_round(record)]


def _sums_of_round(record: RoundRecord) -> Iterator[dict[str, Any]]:
    by_session: dict[int, list[MemberRecord]] = {}
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

"""The log of a run for a person: one line for each noteworthy event or effect. Pure."""

from collections.abc import Iterator

from atoll.protocol.printable import conclusion
from atoll.protocol.vocabulary import Fate, ReleaseReason, RoundId
from atoll.server.rounds.events import (
    Abandon,
    Accept,
    Aggregate,
    ClientFailed,
    ClientLost,
    Commit,
    CoordinatorStarted,
    DrawCohort,
    Effect,
    EndRun,
    Event,
    Invite,
    PauseRun,
    Reject,
    Release,
    UpdateRefused,
)
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine

LINE_MAX = 200
"""The characters of a client's message in a line of the log; `atoll round show` has all of them."""


def narrate(machine: RunMachine, event: Event, effects: tuple[Effect, ...]) -> Iterator[str]:
    """Yield the lines for one event and its effects, after the machine has applied it."""
    yield from _of_event(machine, event)
    invited = [e for e in effects if isinstance(e, Invite)]
    if invited:
        record = machine.record_of(invited[0].round_id)
        assert record is not None
        yield _invited(record, invited, machine.ledger.now)
    for effect in effects:
        if (line := _of_effect(machine, effect)) is not None:
            yield line


def _of_event(machine: RunMachine, event: Event) -> Iterator[str]:
    match event:
        case CoordinatorStarted(down_since):
            yield f"the coordinator is back after {machine.ledger.now - down_since:.1f} s"
        case ClientFailed(client_id, round_id, reason, detail):
            yield f"round {round_id}: {client_id} failed: {reason}{_after_colon(detail)}"
        case UpdateRefused(client_id, round_id, reason, detail):
            yield f"round {round_id}: {client_id} was refused: {reason}{_after_colon(detail)}"
        case ClientLost(client_id, reason):
            yield f"{client_id} is lost: {reason}"
        case _:
            pass


def _of_effect(machine: RunMachine, effect: Effect) -> str | None:
    match effect:
        case DrawCohort(round_id, count, candidates):
            return f"round {round_id}: drawing {count} of {len(candidates)} available clients"
        case Accept(client_id, round_id):
            return _accepted(machine, effect)
        case Release(client_id, round_id, ReleaseReason.OUT_OF_TIME | ReleaseReason.TOO_STALE as reason):
            return f"round {round_id}: {client_id} is told to stop: {reason}"
        case Reject(client_id, round_id, _, reason, detail):
            return f"round {round_id}: {client_id} was refused: {reason}{_after_colon(detail)}"
        case Aggregate(round_id, _, contributions):
            return _closed(machine, round_id, len(contributions))
        case Commit(round_id, version):
            return f"round {round_id}: committed as version {version}"
        case Abandon(round_id, reason):
            record = machine.record_of(round_id)
            return f"round {round_id}: abandoned: {reason}{_after_colon(record.detail if record else '')}"
        case PauseRun(cause):
            return f"the run is paused: {cause}"
        case EndRun(state, cause):
            return f"the run is {state}: {cause}"
        case _:
            return None


def _invited(record: RoundRecord, invited: list[Invite], now: float) -> str:
    left = (record.deadline or 0.0) - (record.drawn_at or 0.0)
    names = ", ".join(e.client_id for e in invited[:8]) + (", ..." if len(invited) > 8 else "")
    again = " again" if len(invited) < len(record.clients) else ""
    if record.mode != "sync":
        left, again = invited[0].deadline - now, ""
    return f"round {record.round_id}: invited{again} {names} (deadline {left:.1f} s)"


def _accepted(machine: RunMachine, accept: Accept) -> str:
    record = machine.record_of(accept.round_id)
    client = record.clients.get(accept.client_id) if record else None
    if record is None or client is None:
        return f"round {accept.round_id}: {accept.client_id} was accepted"
    work = "" if client.work >= 1 else f", {client.work:.0%} of the work"
    late = ", late: it counts in the next round" if accept.carried else ""
    count = f"{record.num_reported} of {record.cohort_size}"
    if record.mode != "sync":
        return f"round {record.round_id}: {accept.client_id} reported {client.num_examples} examples{work}"
    return f"round {record.round_id}: {accept.client_id} reported {client.num_examples} examples{work}{late} ({count})"


def _closed(machine: RunMachine, round_id: RoundId, num_updates: int) -> str:
    record = machine.record_of(round_id)
    reason = record.close_reason if record else ""
    late = [client_id for client_id, _ in record.with_fate(Fate.STRAGGLER)] if record else []
    stragglers = f"; silent: {', '.join(late)}" if late else ""
    updates = "1 update" if num_updates == 1 else f"{num_updates} updates"
    return f"round {round_id}: closed ({reason}), aggregating {updates}{stragglers}"


def _after_colon(detail: str) -> str:
    said = conclusion(detail)[:LINE_MAX]
    return f": {said}" if said else ""

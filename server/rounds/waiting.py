"""The wait of a run, in words: for whom, and why each of them cannot take part now. Pure."""

from collections.abc import Iterable, Iterator

from atoll.protocol.vocabulary import ClientId, FailureReason, Fate, Phase, RunState
from atoll.server.rounds.cohort_round import Round
from atoll.server.rounds.membership import Membership
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine

NAMES_MAX = 8
"""Largest number of clients that a reason names; the others are counted."""


def what_a_pause_waits_for(machine: RunMachine) -> str:
    """Return what a requested pause still waits for; empty: the run is paused, or no pause was requested."""
    if machine.ledger.pause_reason is None:
        return ""
    if machine.round is None:
        return "it pauses when an evaluation is over"
    return f"it pauses when round {machine.round.record.round_id} is over"


def what_a_run_waits_for(machine: RunMachine) -> str:
    """Return for whom or what a running run waits, with the reasons; empty: it is not running, or does not wait."""
    ledger, round_ = machine.ledger, machine.round
    if ledger.state is not RunState.RUNNING:
        return ""
    if round_ is None:
        return _between_rounds(machine)
    record = round_.record
    waiting = [*ledger.training] if record.mode != "sync" else [c for c, _ in record.with_fate(Fate.WAITING)]
    if record.phase is Phase.AGGREGATING:
        return f"round {record.round_id} is being aggregated"
    if not waiting:
        return what_a_round_lacks(machine)
    away = [c for c in waiting if not ledger.membership.is_connected(c)]
    text = f"round {record.round_id} waits for the updates of {named(waiting)}"
    return f"{text}; not connected: {named(away)}" if away else text


def _between_rounds(machine: RunMachine) -> str:
    ledger = machine.ledger
    if (evaluation := ledger.evaluation) is not None:
        asked = [c for c in evaluation.asked if evaluation.is_waiting_for(c)]
        return f"version {evaluation.version} is being evaluated by {named(asked)}"
    if ledger.unevaluated and not ledger.is_round_due:
        return f"version {ledger.unevaluated[0]} is being evaluated by the server"
    if not ledger.retry_at or not ledger.past:
        return ""
    record = ledger.past[max(ledger.past)]
    return f"round {record.round_id} was abandoned; {retry_of(record)}"


def retry_of(record: RoundRecord) -> str:
    """Return when an abandoned round is repeated and which of the retries that is; empty: it is not, or at once."""
    if record.retry_at is None or record.ended_at is None:
        return ""
    which = (
        f"retry {record.retry} of {record.retry_max} follows"
        if record.retry
        else "the next follows, which uses up no retry,"
    )
    return f"{which} {record.retry_at - record.ended_at:.1f} s later"


def what_a_round_lacks(machine: RunMachine) -> str:
    """Return how many clients an open round has and needs, and why the others cannot be invited."""
    round_, membership = machine.round, machine.ledger.membership
    assert round_ is not None
    record, connected, available = round_.record, membership.num_connected, membership.num_available
    needed = record.num_needed_to_draw if isinstance(round_, Round) else 1
    free = "" if available == connected else f", {available or 'none'} available"
    text = f"round {record.round_id} waits for clients: {connected or 'none'} connected{free}"
    text += f", {needed} wanted (quorum {record.quorum})"
    reasons = [*reasons_of(membership, membership.unavailable())]
    return f"{text}: {'; '.join(reasons)}" if reasons else text


def reasons_of(membership: Membership, clients: Iterable[ClientId]) -> Iterator[str]:
    """Yield why connected clients cannot be invited: one clause for those with the same reason."""
    groups: dict[str, list[ClientId]] = {}
    for client_id in clients:
        groups.setdefault(why_not(membership, client_id), []).append(client_id)
    for why, names in groups.items():
        yield f"{named(names)} {why}"


def why_not(membership: Membership, client_id: ClientId) -> str:
    """Return why a member cannot be invited now, as a predicate; empty: it can."""
    member = membership.members[client_id]
    trouble = member.trouble
    if not membership.is_connected(client_id):
        return f"lost ({member.lost_because})" if member.lost_because else "not connected"
    if member.has_declined:
        if trouble is None:
            return "declined"
        waits = "awaiting approval" if trouble.reason == FailureReason.AWAITS_APPROVAL else ""
        waits = waits or ("waiting" if trouble.waits else f"declining ({trouble.reason})")
        return f"{waits} ({trouble.detail})" if trouble.detail else waits
    if trouble is not None and trouble.rest_until:
        many = f"{trouble.failures} failures in a row, the last " if trouble.failures > 1 else ""
        return f"left alone for a while after {many}{trouble.reason}"
    return ""


def named(clients: Iterable[ClientId]) -> str:
    """Return the first few names of some clients, and the number of the others."""
    names = sorted(clients)
    more = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")

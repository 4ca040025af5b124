"""The wait of a run, in words: for which clients, and why each of them cannot take part now. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from atoll.ground.printable import conclusion, some_of
from atoll.protocol.vocabulary import ClientId, FailureReason, Fate, LossReason, Phase, RunState
from atoll.server.members.membership import Membership
from atoll.server.rounds.cohort_round import Round
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine

DISK, TOO_FEW = "disk", "too_few_clients"
"""Causes of a wait for disk space, the coordinator's or a rank's, and for absent clients."""

_AWAY: Mapping[str, str] = {
    LossReason.LEFT: "its agent has ended",
    LossReason.LEASE_EXPIRED: "no sign of life",
    LossReason.REVOKED: "revoked",
}
"""Reasons why a member is not connected, in words."""

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
    """Return for which clients or what a running run waits, with the reasons; empty: not running, or no wait."""
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
        if (sums := machine.sums_of_evaluation) is not None and not sums.measuring:
            missing = sums.missing
            what = f"the secure sum of the metrics of version {evaluation.version}"
            return f"{what} waits for {named(missing)}" if missing else f"{what} is being opened"
        asked = [c for c in evaluation.asked if evaluation.is_waiting_for(c)] if sums is None else sums.measuring
        return f"version {evaluation.version} is being evaluated by {named(asked)}"
    if ledger.unevaluated and not ledger.is_round_due:
        return f"version {ledger.unevaluated[0]} is being evaluated by the server"
    if not ledger.retry_at or not ledger.past:
        return ""
    record = ledger.past[max(ledger.past)]
    why = f" ({record.abandon_reason}: {conclusion(record.detail)})" if record.detail else ""
    return f"round {record.round_id} was abandoned{why}; {retry_of(record)}"


def retry_of(record: RoundRecord) -> str:
    """Return when an abandoned round is repeated and which of the retries this is; empty: it is not, or at once."""
    if record.retry_at is None or record.ended_at is None:
        return ""
    later = f"{record.retry_at - record.ended_at:.1f} s later"
    if record.retry:
        return f"retry {record.retry} of {record.retry_max} follows {later}"
    return f"the next round begins {later}, and no retry is used"


@dataclass(frozen=True, slots=True)
class Missing:
    """Client that a waiting run lacks."""

    client: ClientId
    since: float | None  # when it went away, or declined [s since the epoch]; None: not known
    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait of a run that no retry can end: for clients, for disk space, for an approval."""

    cause: str  # "too_few_clients", "awaits_approval", "disk"
    since: float  # [s since the epoch]
    missing: tuple[Missing, ...] = ()
    detail: str = ""  # message about the disk

    def sentence(self) -> str:
        """Return the cause with its beginning and the names, independent of the time of reading."""
        if self.cause == DISK:
            since = f"since {_instant(self.since)}: {self.detail}"
            return f"waiting for room on disk {since}: free some, and it continues by itself"
        names = [f"{m.client} ({m.why}{f', since {_instant(m.since)}' if m.since else ''})" for m in self.missing]
        lacking = some_of(names, NAMES_MAX) or "no client has joined yet: `atoll client invite NAME` invites a site"
        return f"waiting for clients since {_instant(self.since)}: {lacking}"


def wait_of(machine: RunMachine) -> Wait | None:
    """Return what a run waits for before its next round can invite clients, or why it is paused; None: nothing."""
    ledger, round_ = machine.ledger, machine.round
    membership = ledger.membership
    if ledger.short_since is not None and (ledger.state is RunState.RUNNING or ledger.resumes_itself):
        return Wait(DISK, ledger.short_since, detail=ledger.short_of)
    if ledger.state is RunState.PAUSED and ledger.resumes_itself:
        last = ledger.past[max(ledger.past)]
        return Wait(TOO_FEW, last.waiting_since or ledger.now, _missing(membership))
    if ledger.state is not RunState.RUNNING or round_ is None or ledger.training or not round_.may_draw:
        return None
    record = round_.record
    there = {*(update.client_id for update in round_.held), *membership.available()}
    if len(there) >= record.quorum:
        return None
    awaits_approval = len(there.union(membership.awaiting())) >= record.quorum
    cause = "awaits_approval" if awaits_approval else TOO_FEW
    return Wait(cause, record.waiting_since or record.opened_at, _missing(membership))


def _missing(membership: Membership) -> tuple[Missing, ...]:
    """Return the members that cannot be invited, sorted."""
    whys = ((c, why_not(membership, c)) for c in sorted(membership.members))
    return tuple(Missing(c, membership.away_since(c), why) for c, why in whys if why)


def _instant(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


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
    """Yield why connected clients cannot be invited: one clause for all clients with the same reason."""
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
        return _AWAY[member.lost_because] if member.lost_because else "not connected"
    if member.has_declined:
        if trouble is None:
            return "declined"
        waits = "awaiting approval" if trouble.reason == FailureReason.AWAITS_APPROVAL else ""
        waits = waits or ("waiting" if trouble.waits else f"declining ({trouble.reason})")
        return f"{waits} ({trouble.detail})" if trouble.detail else waits
    if trouble is not None and trouble.rest_until:
        many = f"{trouble.failures} failures in a row, the last " if trouble.failures > 1 else ""
        return f"not invited for a while after {many}{trouble.reason}"
    if member.is_spent:
        return "without a privacy budget for another round"
    return f"apart from its last use until version {member.apart_until}" if member.apart_until else ""


def named(clients: Iterable[ClientId]) -> str:
    """Return the first few names of some clients, and the number of the others."""
    return some_of(sorted(clients), NAMES_MAX)

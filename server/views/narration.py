"""The log of a run in words: one line for each noteworthy event or effect. Pure."""

from collections.abc import Iterator, Mapping

from atoll.ground.printable import conclusion, count_of, span
from atoll.protocol.vocabulary import DECLINES, FailureReason, Fate, ReleaseReason, RoundId, RunState
from atoll.server.rounds.client_evaluation import SILENT, merged
from atoll.server.rounds.events import (
    Abandon,
    Accept,
    Aggregate,
    AskEvaluation,
    ClientEvaluated,
    ClientFailed,
    ClientJoined,
    CloseEvaluation,
    Commit,
    CoordinatorStarted,
    DiskFree,
    DiskShort,
    DrawCohort,
    Effect,
    EndRun,
    Event,
    FilesLost,
    Invite,
    MetricsComputed,
    PauseRun,
    PublishedNamed,
    Reject,
    Release,
    ResumeRequested,
    TimePassed,
    UpdateReceived,
    UpdateRefused,
)
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.waiting import DISK, named, retry_of, wait_of, what_a_round_lacks
from atoll.server.views.reasons import explain
from atoll.server.views.secure_sums import session_lines
from atoll.task.metrics import LEFT_OUT

LINE_MAX = 200
"""Number of characters of a client's message in a log line; `atoll round show` has all of them."""

WAITS_MAX = 100
"""Number of lines about the wait of one round that are remembered, so that none is repeated."""


class LogLine(str):
    """Line of a run's log, with the round and the client that it is about, if any."""

    fields: Mapping[str, object]

    def __new__(cls, text: str, about: object = None, *, site: str = "") -> "LogLine":
        """Make the line about an event, an effect or a record, with the round and the client that it names, if any."""
        line = super().__new__(cls, text)
        named = about.update if isinstance(about, UpdateReceived) else about
        is_of_version = getattr(named, "purpose", "") == "evaluation"  # its number is in the place of a round's
        line.fields = {
            "round": None if is_of_version else getattr(named, "round_id", None),
            "site": site or getattr(named, "client_id", None),
        }
        return line


class Narrator:
    """Log of one run, which remembers its lines about the open round's wait, because a client may come and go."""

    def __init__(self) -> None:
        self._waits: set[tuple[str, str]] = set()

    def lines(self, machine: RunMachine, event: Event, effects: tuple[Effect, ...]) -> tuple[str, ...]:
        """Return the lines for one event and its effects, after the machine has applied it; a restart repeats a wait.

        Call it for each event in turn.
        """
        if isinstance(event, CoordinatorStarted):
            self._waits.clear()
        return (*narrate(machine, event, effects), *self._new_wait(machine, event))

    def _new_wait(self, machine: RunMachine, event: Event) -> tuple[str, ...]:
        lacks = wait_of(machine) if isinstance(event, TimePassed | DiskShort) else None
        record = machine.round.record if machine.round is not None else None
        if lacks is not None and lacks.cause == DISK:
            return (LogLine(lacks.sentence(), record),)
        wait = wait_for_clients(machine)
        if wait and lacks is not None:
            return (LogLine(f"{wait}; {lacks.sentence()}", record),)  # each hour
        if not wait or len(self._waits) >= WAITS_MAX:
            self._waits.clear()
        news = wait.partition(":")[0], wait.partition(" wanted")[2]  # their number is logged as they connect
        if not wait or news in self._waits:
            return ()
        self._waits.add(news)
        return (LogLine(wait, record),)


OLDER_STATE = (
    "sites have seen newer rounds than this coordinator's state has: an older or empty state is in use. If "
    "the newer state is still there, stop this coordinator and use that one; or let each site's operator accept it"
)
"""Line about the first site of a round that refuses a rollback."""


def narrate(machine: RunMachine, event: Event, effects: tuple[Effect, ...]) -> Iterator[str]:
    """Yield the lines for one event and its effects, after the machine has applied it."""
    yield from (LogLine(line, event) for line in _of_event(machine, event))
    yield from _of_evaluation(machine, event, effects)
    invited = [e for e in effects if isinstance(e, Invite)]
    if invited:
        record = machine.record_of(invited[0].round_id)
        assert record is not None
        yield LogLine(_invited(record, invited, machine.ledger.now), record)
    for effect in effects:
        if (line := _of_effect(machine, effect)) is not None:
            yield LogLine(line, effect)
    yield from (LogLine(line, event) for line in session_lines(machine, event, effects))


def wait_for_clients(machine: RunMachine) -> str:
    """Return for which clients an open round waits before it can invite, and why; empty: it does not wait."""
    if machine.ledger.state is not RunState.RUNNING or machine.round is None:
        return ""
    return "" if machine.ledger.training or not machine.round.may_draw else what_a_round_lacks(machine)


def _of_evaluation(machine: RunMachine, event: Event, effects: tuple[Effect, ...]) -> Iterator[str]:
    asked = [effect for effect in effects if isinstance(effect, AskEvaluation)]
    if asked and not isinstance(event, ClientJoined):
        left, names = asked[0].deadline - machine.ledger.now, named(effect.client_id for effect in asked)
        yield f"version {asked[0].version}: asked {names} to evaluate it (deadline {left:.1f} s)"
    if isinstance(event, ClientEvaluated) and event.statistics is None:
        again = "; it is not asked again until it reports that it is ready" if event.reason in DECLINES else ""
        yield f"version {event.version}: {event.client_id} did not evaluate it{_after_colon(event.detail)}{again}"
    for effect in effects:
        if isinstance(effect, CloseEvaluation):
            silent = [c for c, why in effect.failures.items() if why == SILENT]
            late = f"; no answer in time from {named(silent)}" if silent else ""
            found = merged(effect.answers, max_share=effect.max_share)
            number = count_of(len(effect.summed) or found.num_clients, "client")
            yield f"version {effect.version}: evaluated by {number}{' in secure sums' if effect.summed else ''}{late}"
            nothing = [(client, why) for client, why in effect.failures.items() if LEFT_OUT in why]
            for client, why in sorted([*effect.refused.items(), *found.said, *nothing]):
                yield f"version {effect.version}: of {client}, {why}"


def _of_event(machine: RunMachine, event: Event) -> Iterator[str]:
    match event:
        case CoordinatorStarted(down_since):
            due = machine.ledger.retry_at - machine.ledger.now
            then = f"; the next round begins in {due:.1f} s" if machine.ledger.is_round_due and due > 0 else ""
            yield f"the coordinator is back after {span(machine.ledger.now - down_since)}{then}"
        case ClientFailed():
            yield from _failed(machine, event)
        case UpdateRefused(client_id, round_id, reason, detail):
            yield f"round {round_id}: {client_id} was refused: {reason}{_after_colon(detail)}"
        case DiskFree():
            yield "there is room on disk again: the run continues, with its deadlines later by the wait"
        case FilesLost(updates, versions, detail=detail):
            lost = [count_of(len(updates), "accepted update")] * bool(updates)
            lost += [f"version {', '.join(map(str, versions))}"] * bool(versions)
            yield f"lost on the coordinator's disk: {' and '.join(lost)}: {detail[:LINE_MAX]}"
        case MetricsComputed(version, source) if machine.rules.best is not None and machine.rules.best.source == source:
            best = machine.ledger.best
            if best is not None and best.version == version:
                yield f"version {version}: the best so far: {machine.rules.best} is {best.value:.6g}"
        case PublishedNamed(round_id) if machine.rules.privacy is not None:
            spent = machine.rules.privacy.epsilon_of(machine.ledger.membership.most_spent)
            yield f"restored from a backup; charged as published to round {round_id}: epsilon spent is {spent:.6g}"
        case ResumeRequested(wait):
            yield "the run is resumed" + (", and waits until there is room" if wait else "")
        case _:
            pass


def _failed(machine: RunMachine, event: ClientFailed) -> Iterator[str]:
    record = machine.record_of(event.round_id)
    row = record.clients.get(event.client_id) if record is not None else None
    rest = f"; it is not invited for {row.rest:.1f} s" if row is not None and row.rest else ""
    yield f"round {event.round_id}: {event.client_id} failed: {event.reason}{_after_colon(event.detail)}{rest}"
    older = [row for row in record.clients.values() if row.reason == FailureReason.ROLLBACK] if record else []
    if event.reason == FailureReason.ROLLBACK and len(older) == 1:
        yield OLDER_STATE


def _of_effect(machine: RunMachine, effect: Effect) -> str | None:
    match effect:
        case DrawCohort(round_id, count, candidates):
            return f"round {round_id}: drawing {count} of {count_of(len(candidates), 'available client')}"
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
            then = retry_of(record) if record is not None else ""
            why = f"{explain(reason)} ({reason}){_after_colon(record.detail if record else '')}"
            return f"round {round_id}: abandoned: {why}" + (f"; {then}" if then else "")
        case PauseRun(cause):
            return f"the run is paused: {cause}{_dropped(machine)}"
        case EndRun(state, cause):
            return f"the run is {state}: {cause}{_dropped(machine)}"
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
    if client.sum is not None:
        return f"round {record.round_id}: {accept.client_id} sent its masked update"
    count = f"{record.num_reported} of {record.cohort_size}"
    reported = f"round {record.round_id}: {accept.client_id} reported {count_of(client.num_examples, 'example')}{work}"
    if record.mode != "sync":
        return reported
    return f"{reported}{late} ({count})"


def _closed(machine: RunMachine, round_id: RoundId, num_updates: int) -> str:
    record = machine.record_of(round_id)
    reason = record.close_reason if record else None
    why = f"{explain(reason)} ({reason})" if reason else "by an earlier process"
    late = sorted(client_id for client_id, _ in record.with_fate(Fate.STRAGGLER, Fate.RELEASED)) if record else []
    stragglers = f"; without {named(late)}" if late else ""
    updates = count_of(num_updates, "update")
    return f"round {round_id}: closed: {why}; aggregating {updates}{stragglers}"


def _dropped(machine: RunMachine) -> str:
    """Return the number of an asynchronous run's invitations that became too old to count; empty if synchronous."""
    if not machine.rules.policy.is_asynchronous:
        return ""
    return f"; {count_of(machine.ledger.num_too_old, 'update')} dropped as too old"


def _after_colon(detail: str) -> str:
    said = conclusion(detail)[:LINE_MAX]
    return f": {said}" if said else ""

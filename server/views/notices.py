"""The notices of a coordinator, from the state of its runs, members, clocks and disk. Pure.

Each sentence says what is wrong, where, and which command helps. It has names, times, sizes and reasons of the
vocabulary: never a message of a site or of a task, which might contain data.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from atoll.ground.printable import printable_size
from atoll.protocol.identity.clock_hint import instant
from atoll.protocol.identity.names import Role
from atoll.protocol.notices.notice import CERTIFICATE_LEFT, Condition, Notice
from atoll.protocol.vocabulary import FailureReason, RunState
from atoll.server.identity.register import Member, Standing
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.waiting import DISK, named, wait_of
from atoll.server.views.reasons import explain

AUTHORITY_LEFT_S = 180 * 86400.0
"""Remaining life of an authority below which it is reported [s]: nothing renews it automatically."""

_LISTED = {Role.CLIENT: "site", Role.AGGREGATOR: "aggregation rank", Role.COORDINATOR: "coordinator"}
"""Roles whose certificates a process renews; people renew theirs with their next command."""

_HAS_CERTIFICATE = (Standing.MEMBER, Standing.LAPSED, Standing.BY_HAND)

_ENDS = {
    RunState.FAILED: Condition.RUN_FAILED,
    RunState.PAUSED: Condition.RUN_PAUSED,
    RunState.STOPPED: Condition.RUN_STOPPED,
    RunState.FINISHED: Condition.RUN_FINISHED,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a coordinator, for the commands in its sentences."""

    state: str
    """Path of the state directory."""
    there: str
    """Option that names it, as written in a shell."""


def of_run(run_id: str, state: RunState, machine: RunMachine | None, place: Place) -> Iterator[Notice]:
    """Yield the notices of a run.

    Args:
        run_id: id of the run.
        state: state of the run.
        machine: machine of a run of rounds; None: the run is of messages.
        place: place of the coordinator.
    """
    if (condition := _ENDS.get(state)) is not None:
        yield Notice(condition, run_id, _end(run_id, state, machine, place), run=run_id)
    if machine is None or state is not RunState.RUNNING:
        return
    membership = machine.ledger.membership
    for client in membership.awaiting():
        trouble = membership.members[client].trouble
        if trouble is not None and trouble.reason == FailureReason.AWAITS_APPROVAL:
            sentence = f"run {run_id} waits for the approval of site {client}: its operator types there"
            sentence += f" `atoll site approve {run_id}`; `atoll site list` shows the terms first"
            yield Notice(Condition.APPROVAL, f"{run_id} at {client}", sentence, run=run_id)
    wait = wait_of(machine) if machine.ledger.short_since is not None else None  # else it visits all members
    if wait is not None and wait.cause == DISK:
        yield Notice(Condition.DISK, run_id, f"run {run_id} is {wait.sentence()}", run=run_id, is_logged=True)


def _end(run_id: str, state: RunState, machine: RunMachine | None, place: Place) -> str:
    show, resume = f"`atoll run show {run_id} {place.there}`", f"`atoll run resume {run_id} {place.there}`"
    at = "" if machine is None else f" at version {machine.ledger.version}"
    if state is RunState.FINISHED:
        export = f"`atoll model export --run {run_id} --out model.safetensors {place.there}` writes the model"
        return f"run {run_id} is finished{at}: {show if machine is None else export}"
    if state is RunState.STOPPED:
        return f"run {run_id} is stopped{at} by its operator: {resume} reopens it"
    if state is RunState.PAUSED:
        wait = None if machine is None else wait_of(machine)
        if wait is not None:
            who = f"missing: {named(one.client for one in wait.missing)}"
            return f"run {run_id} is paused{at}, as it has waited for sites for too long; {who}; it resumes by itself"
        return f"run {run_id} is paused{at}{_why(machine)}: {show} has the cause, {resume} continues it"
    failed = f"run {run_id} is failed{at}{_why(machine)}"
    return f"{failed}: {show} has the cause, {resume} continues it once the cause is removed"


def _why(machine: RunMachine | None) -> str:
    """Return the reason of the newest round's end, in words of the vocabulary; empty: it explains nothing."""
    if machine is None or not machine.ledger.past:
        return ""
    record = machine.ledger.past[max(machine.ledger.past)]
    return f", as in round {record.round_id} {explain(record.abandon_reason)}" if record.abandon_reason else ""


def of_absent(client: str, since: float, hold: float, place: Place) -> Notice:
    """Return the notice of a site that is not connected.

    Args:
        client: the site.
        since: when it was first missed [s since the epoch].
        hold: the time after which it is reported [s].
        place: place of the coordinator.
    """
    look = f"`atoll client list {place.there}` shows all sites"
    gone = f"if it has left for good: `atoll client revoke {client} {place.there}`"
    what = f"site {client} is away since {instant(since)}: start its agent there, or check its network and its log"
    return Notice(Condition.AWAY, client, f"{what}; {look}; {gone}", hold=hold, is_once=True)


def of_member(member: Member, now: float, place: Place) -> Iterator[Notice]:
    """Yield the notice of a member whose certificate ends soon, or has ended."""
    identity, until = member.identity, member.expires_at
    if identity.role not in _LISTED or member.standing not in _HAS_CERTIFICATE or until is None:
        return
    if until - now >= (until - member.since) * CERTIFICATE_LEFT:
        return
    what = _LISTED[identity.role]
    who = "this coordinator" if identity.role is Role.COORDINATOR else f"{what} {identity.name}"
    role = f" --role {identity.role}" if identity.role is Role.AGGREGATOR else ""
    invite = f"`atoll client invite {identity.name}{role} {place.there}` and --join with the code"
    if identity.role is Role.COORDINATOR:
        remedy = "its log has the reason; an authority elsewhere needs `atoll authority serve`"
        remedy = remedy if now < until else f"{remedy}; then start it again"
    else:
        remedy = invite if now >= until else f"its process renews it when it runs and is connected; else {invite}"
    if now >= until:
        sentence = f"the certificate of {who} has ended at {instant(until)}: {remedy}"
        yield Notice(Condition.CERTIFICATE, f"{identity}, ended", sentence, is_once=True)
    else:
        sentence = f"the certificate of {who} ends at {instant(until)} and was not renewed: {remedy}"
        yield Notice(Condition.CERTIFICATE, str(identity), sentence)


def of_authority(until: float, now: float, place: Place) -> Iterator[Notice]:
    """Yield the notice of an authority that ends within `AUTHORITY_LEFT_S`."""
    if until - now < AUTHORITY_LEFT_S:
        what = "has ended, and no certificate is valid" if now >= until else "ends, and with it every certificate,"
        remedy = (
            "`atoll authority replace DIR` (identity/authority in the state directory), then a restart, replaces it"
        )
        sentence = f"the authority of {place.state} {what} at {instant(until)}: {remedy}"
        yield Notice(Condition.CERTIFICATE, "authority", sentence)


def of_disk(free: float, limit: int, place: Place) -> Iterator[Notice]:
    """Yield the notice of a disk with less free than the limit [bytes]."""
    if free < limit:
        what = f"the disk of {place.state} has {printable_size(int(free))} free, less than {printable_size(limit)}"
        help_ = f"free some; `atoll run delete RUN {place.there}` deletes an ended run with its versions"
        yield Notice(Condition.DISK, place.state, f"{what} (notify.disk): {help_}")


def of_clocks(told: Mapping[str, str]) -> Iterator[Notice]:
    """Yield the notices of clocks that differ now, with the messages of `hosting.clock_watch`."""
    for subject, sentence in told.items():
        yield Notice(Condition.CLOCK, subject, sentence, is_logged=True)


def of_jump(sentence: str, now: float) -> Notice:
    """Return the notice of a jump of this machine's clock."""
    return Notice(Condition.CLOCK, "jump", f"{sentence}; check NTP (`timedatectl`)", is_logged=True)


def of_audit(damage: str, place: Place) -> Iterator[Notice]:
    """Yield the notice of a broken chain of the audit log; "": it is not broken."""
    if damage:
        yield Notice(Condition.AUDIT, f"{place.state}/audit", damage, is_logged=True)


def of_software(client: str, before: str, now: str, place: Place) -> Notice:
    """Return the notice of a site whose agent has a new version."""
    sentence = f"site {client} runs {now} now, {before} before; `atoll client list {place.there}` shows all versions"
    return Notice(Condition.VERSION, client, sentence)

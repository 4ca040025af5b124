"""Whether what the coordinator says is new: the rule against rollback and replay. Pure; the clock is an argument.

Of each run a client remembers the newest instant, round and version that it was shown. Under one signature these only
ever grow: rounds are never reused, a round has one base version, a version one digest, and every message a later
instant than the one before it. So whatever is older is a replay, or comes from a coordinator that has forgotten what it
said before (restored from a backup, or begun anew under the run's name); only this site's operator can allow that.

A client that comes back is invited again to the round that it works for: a later instant, and the same round, version
and digest. What a round that is told again may cost a site is for its policy to say (`policy/`).

The time that is left was counted when the message was signed: what has passed since is over.
"""

from dataclasses import dataclass, replace

from atoll.client.session.events import Asked, EvaluationRequest, Event, Invitation, Released, Request, RunEnded
from atoll.protocol.vocabulary import Digest, FailureReason, RoundId, RunId, Version

SKEW_S = 300.0
"""By how much this clock and the coordinator's may differ."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest of one run that this client was shown."""

    issued_us: int = 0
    round_id: RoundId = RoundId(0)  # noqa: RUF009
    base_version: Version = Version(0)  # noqa: RUF009 - of that round
    version: Version = Version(0)  # noqa: RUF009
    digest: Digest = Digest("")  # noqa: RUF009 - of that version; empty: none was shown


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a client does not do what it is told."""

    reason: FailureReason
    detail: str


def judge(event: Event | None, issued_us: int, seen: Seen, now: float) -> Seen | Refused:
    """What is seen now, or why the message does not count.

    Args:
        event: what a message whose signature is good says; None: nothing that concerns a run.
        issued_us: when it was signed [us since the epoch].
        seen: of the run that it is about.
        now: this client's wall clock [s since the epoch].
    """
    if abs(late := _age(issued_us, now)) > SKEW_S:
        return Refused(FailureReason.CLOCK_SKEW, _clocks(late))
    if issued_us <= seen.issued_us:
        what = "a message that is as new as this one, or newer, was here before"
        return Refused(FailureReason.REPLAYED, what)
    seen = replace(seen, issued_us=issued_us)
    if not isinstance(event, Asked):
        return seen
    request = event.request
    if fault := _older(request, seen):
        return Refused(FailureReason.ROLLBACK, fault)
    if (over := late - request.time_left) >= 0:
        return Refused(FailureReason.OUT_OF_TIME, f"its deadline was {over:.1f} s ago when it arrived")
    version = _version(request)
    seen = replace(seen, version=version, digest=request.model_digest)
    if isinstance(request, Invitation):
        seen = replace(seen, round_id=request.round_id, base_version=version)
    return seen


def timed(event: Event | None, issued_us: int, now: float) -> Event | None:
    """The same event with the time that is left of it now; a clock that is behind makes no time."""
    if not isinstance(event, Asked):
        return event
    left = max(0.0, event.request.time_left - max(0.0, _age(issued_us, now)))
    return Asked(replace(event.request, time_left=left))


def _age(issued_us: int, now: float) -> float:
    return now - issued_us / 1e6


def _older(request: Request, seen: Seen) -> str:
    """What of a request is older than what was seen, or contradicts it; empty when nothing is."""
    version, again = _version(request), f"; {ACCEPT} allows it once"
    if isinstance(request, Invitation):
        if request.round_id < seen.round_id:
            return f"round {request.round_id} is older than round {seen.round_id}, which was here before{again}"
        if request.round_id == seen.round_id and version != seen.base_version and seen.round_id:
            return f"round {request.round_id} began from version {seen.base_version}, not {version}{again}"
    if version < seen.version:
        return f"version {version} is older than version {seen.version}, which was here before{again}"
    if version == seen.version and seen.digest and request.model_digest != seen.digest:
        return f"version {version} was {seen.digest[:12]} before, and is {request.model_digest[:12]} now{again}"
    return ""


ACCEPT = "`atoll site accept-rollback`"
"""What this site's operator can do about it; see docs/protocol.md."""


def run_of(event: Event | None) -> RunId:
    """The run that an event is about; empty when it is about none."""
    match event:
        case Asked(request):
            return request.run_id
        case Released(run_id) | RunEnded(run_id):
            return run_id
    return RunId("")


def _version(request: Request) -> Version:
    return request.version if isinstance(request, EvaluationRequest) else request.base_version


def _clocks(late: float) -> str:
    side = "behind" if late > 0 else "ahead of"
    what = f"it was signed {abs(late):.0f} s {side} this machine's clock; allowed: {SKEW_S:.0f}"
    return f"{what}. If the message is not an old one, set the clocks (NTP)"

"""The rules against rollback and replay: every message of the coordinator must be new. Pure; the clock is an argument.

A client remembers the newest instant, round and version of each run that it has seen. From one coordinator these only
grow: a round is never reused, it has one base version, a version has one digest, and each message is signed later than
its predecessor. So an older message is a replay, or its coordinator has lost its state (restored from a backup, or
restarted from nothing under the run's name); only this site's operator can allow that.

A reconnecting client is invited again to its current round: at a later instant, with the same round, version and
digest. The site's policy limits what a repeated round may cost (`policy/`).

`time_left` counts from the signature, so the time since then is subtracted. The Welcome of a connection shows by how
much the two clocks differ, and this difference is not counted as time passed.
"""

from dataclasses import dataclass, replace

from atoll.client.session.events import (
    Asked,
    EvaluationRequest,
    Event,
    Invitation,
    ModelRequest,
    Released,
    RunEnded,
    StatisticsRequest,
)
from atoll.ground.printable import span
from atoll.protocol.identity.clock_hint import SKEW_S, instant
from atoll.protocol.vocabulary import Digest, FailureReason, RoundId, RunId, Version

FUTURE_MAX_S = 240.0
"""Largest time by which the newest instant seen may lie in the future [s]. A later one came from a clock that was
ahead, and is ignored: it would refuse every message until the corrected clocks catch up."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Newest instant, round and version that this client has seen of one run."""

    issued_us: int = 0
    round_id: RoundId = RoundId(0)  # noqa: RUF009
    base_version: Version = Version(0)  # noqa: RUF009
    """Base version of `round_id`."""
    version: Version = Version(0)  # noqa: RUF009
    digest: Digest = Digest("")  # noqa: RUF009
    """Digest of `version`; empty: none seen."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Refusal of a message, and its reason."""

    reason: FailureReason
    detail: str


def judge(event: Event | None, issued_us: int, seen: Seen, now: float, *, ahead: float = 0.0) -> Seen | Refused:
    """Judge a message whose signature is valid: return the new state of the run, or the refusal.

    Args:
        event: content of the message; None: it concerns no run.
        issued_us: instant of the signature [us since the epoch].
        seen: newest round and version seen of the run before.
        now: this client's wall clock [s since the epoch].
        ahead: the client's wall clock minus the coordinator's at connection time [s].
    """
    if abs(late := age_of(issued_us, now)) > SKEW_S:
        return Refused(FailureReason.CLOCK_SKEW, _clocks(late, now))
    if issued_us <= seen.issued_us and (early := -age_of(seen.issued_us, now)) <= FUTURE_MAX_S:
        reason = FailureReason.REPLAYED if early <= 0 else FailureReason.CLOCK_SKEW
        return Refused(reason, "a message as new as this one, or newer, arrived before")
    seen = replace(seen, issued_us=issued_us)
    if not isinstance(event, Asked):
        return seen
    request = event.request
    if not isinstance(request, StatisticsRequest) and (fault := _older(request, seen)):
        return Refused(FailureReason.ROLLBACK, fault)
    if (over := late - ahead - request.time_left) >= 0:
        return Refused(FailureReason.CLOCK_SKEW, f"it arrived {over:.1f} s after its deadline, or a clock was set")
    if isinstance(request, StatisticsRequest):
        return seen
    version = _version(request)
    seen = replace(seen, version=version, digest=request.model_digest)
    if isinstance(request, Invitation):
        seen = replace(seen, round_id=request.round_id, base_version=version)
    return seen


def timed(event: Event | None, issued_us: int, now: float, *, ahead: float = 0.0) -> Event | None:
    """Return the event with its remaining time as of now; a message from the future does not get more time.

    Args:
        event: content of the message.
        issued_us: instant of the signature [us since the epoch].
        now: this client's wall clock [s since the epoch].
        ahead: the client's wall clock minus the coordinator's at connection time [s].
    """
    if not isinstance(event, Asked):
        return event
    left = max(0.0, event.request.time_left - max(0.0, age_of(issued_us, now) - ahead))
    return Asked(replace(event.request, time_left=left))


def age_of(issued_us: int, now: float) -> float:
    """Return the time from a signature [us since the epoch] to now [s since the epoch], in seconds."""
    return now - issued_us / 1e6


def _older(request: ModelRequest, seen: Seen) -> str:
    """Return how a request is older than the seen ones, or contradicts them; empty if it is neither."""
    version, again = _version(request), f"; `{ACCEPT} {request.run_id}` at this site allows it once"
    if isinstance(request, Invitation):
        if request.round_id < seen.round_id:
            return f"round {request.round_id} is older than round {seen.round_id}, which this site has seen{again}"
        if request.round_id == seen.round_id and version != seen.base_version and seen.round_id:
            return f"round {request.round_id} began from version {seen.base_version}, not {version}{again}"
    if version < seen.version:
        return f"version {version} is older than version {seen.version}, which this site has seen{again}"
    if version == seen.version and seen.digest and request.model_digest != seen.digest:
        return f"version {version} was {seen.digest[:12]} before, and is {request.model_digest[:12]} now{again}"
    return ""


ACCEPT = "atoll site accept-rollback"
"""Command with which this site's operator allows a rollback; see docs/protocol.md."""


def run_of(event: Event | None) -> RunId:
    """Return the run of an event; empty if it has none."""
    match event:
        case Asked(request):
            return request.run_id
        case Released(run_id) | RunEnded(run_id):
            return run_id
    return RunId("")


def _version(request: ModelRequest) -> Version:
    return request.version if isinstance(request, EvaluationRequest) else request.base_version


def _clocks(late: float, now: float) -> str:
    side = "behind" if late > 0 else "ahead of"
    fault = f"it was signed {span(late)} {side} this machine's clock; allowed: {SKEW_S:.0f} s"
    clocks = f"it was signed at {instant(now - late)}, and this machine's clock shows {instant(now)}"
    return f"{fault}. If the message is not an old one, set the clocks (NTP): {clocks}"

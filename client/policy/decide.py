"""The decision of a site's policy about one request. Pure: policy, request, history and the instant are arguments.

The rules are checked in a fixed order; the first one that objects determines the decision:

    tasks -> runs -> rejected -> secure -> budget -> approval -> actions -> metrics, statistics, metrics_only
    -> upload_max_bytes -> hours -> rounds_per_day

A request without an objection is *allowed*. It is *refused* if only a changed policy or decision of the operator could
allow it, and *waiting* if it will be allowed in time or by the operator's approval.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from fnmatch import fnmatchcase

from atoll.client.policy.config import DAYS, Hours, SecurePolicy, SitePolicy, zone_of
from atoll.client.policy.shared_noise import fault_of_shares
from atoll.ground.printable import count_of
from atoll.protocol.secure.privacy_terms import read_privacy
from atoll.protocol.secure.session_size import MEMBERS_MIN
from atoll.protocol.secure.terms import Terms


class Kind(StrEnum):
    """Kind of a request, by its work."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    STATISTICS = "statistics"
    UPLOAD = "upload"


COUNTED = (Kind.TRAIN, Kind.UPLOAD)
"""Kinds that belong to a round, which `rounds_per_day` counts."""


_WORK = {Kind.TRAIN: "a training", Kind.EVALUATE: "an evaluation", Kind.STATISTICS: "statistics of the data"}


class Outcome(StrEnum):
    """Outcome of a decision."""

    ALLOWED = "allowed"
    REFUSED = "refused"
    WAITING = "waiting"


class Rule(StrEnum):
    """Rule that determined a decision; `NONE_OBJECTS` for an allowed request."""

    NONE_OBJECTS = "none_objects"
    TASKS = "tasks"
    RUNS = "runs"
    REJECTED = "rejected"
    SECURE = "secure"
    BUDGET = "budget"
    APPROVAL = "approval"
    ACTIONS = "actions"
    METRICS = "metrics"
    STATISTICS = "statistics"
    METRICS_ONLY = "metrics_only"
    UPLOAD_MAX_BYTES = "upload_max_bytes"
    HOURS = "hours"
    ROUNDS_PER_DAY = "rounds_per_day"
    POLICY_FILE = "policy_file"
    DISK_FULL = "disk_full"
    STATE = "state"


class Standing(StrEnum):
    """Operator's decision about a run."""

    UNDECIDED = "undecided"
    APPROVED = "approved"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """Request of a coordinator, or of an update in the spool that is ready to be sent."""

    kind: Kind
    run_id: str
    task: str
    number: int
    """Number of the round; of an evaluation, its version; of statistics, their request."""
    local: str | None = None
    """Settings of the training, JSON; None: the request is an upload, whose training was checked before."""
    algorithm: str | None = None
    """Algorithm of a training."""
    codec: str | None = None
    """Codec of a training's update; empty: plain."""
    metrics: str = "merged"
    """Form in which the site's metrics leave it (`Disclosure`), or its statistics (`StatisticsTerms`)."""
    action: str = ""
    """Kind and action of a server program's message; empty: the request is not a message."""
    content: str = ""
    """SHA-256 of the training (`content_of`), or of the update's manifest."""
    num_bytes: int | None = None
    """Size of the update [bytes], or, before it exists, of the model; None: not known yet."""
    terms: Terms | None = None
    """Terms of the secure sum that the work is for; None: its result would leave outside of one."""
    is_masked: bool = False
    """Whether an upload is of a masked update, of a round whose secure sum this site has joined."""

    @property
    def secure(self) -> str:
        """Digest of the terms of a secure sum that an approval covers; empty: there is none."""
        return "" if self.terms is None else self.terms.approved.hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Part of the site's history that a decision about one request needs."""

    standing: Standing = Standing.UNDECIDED
    rounds_today: int = 0
    """Number of rounds counted on the day of the decision."""
    is_counted: bool = False
    """Whether the request continues a counted round."""
    turn: int = 0
    """Number of times that the round has begun, including this one; 0: there is no round."""
    terms: str = ""
    """Fingerprint of the terms on which the run asks; empty: it has not asked."""
    over_budget: str = ""
    """Why the budget of the data that the request reads does not allow it; empty: it does, or there is none."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to a request: its outcome, the rule that gave it, and a sentence for people on both sides."""

    outcome: Outcome
    rule: Rule
    detail: str = ""

    @property
    def is_allowed(self) -> bool:
        """Return whether the request is allowed."""
        return self.outcome is Outcome.ALLOWED


ALLOWED = Decision(Outcome.ALLOWED, Rule.NONE_OBJECTS)


def decide(policy: SitePolicy, request: PolicyRequest, history: History, now: float) -> Decision:
    """Decide about a request: the first objection in the order of the rules, or `ALLOWED`.

    Args:
        policy: the site's policy.
        request: the request of the coordinator, or of an update.
        history: the rounds that were counted and the runs that were approved before.
        now: seconds since the epoch.
    """
    objection = _object_to_run(policy, request, history) or _object_to_size(policy, request)
    return objection or _object_to_time(policy, request, history, now) or ALLOWED


def _object_to_run(policy: SitePolicy, request: PolicyRequest, history: History) -> Decision | None:
    if not _matches(request.task, policy.tasks):
        return _refused(Rule.TASKS, f"task {request.task!r} is not allowed here")
    if not _matches(request.run_id, policy.runs):
        return _refused(Rule.RUNS, f"run {request.run_id!r} is not allowed here")
    if history.standing is Standing.REJECTED:
        return _refused(Rule.REJECTED, f"run {request.run_id!r} was rejected here")
    if fault := _fault_of_secrecy(policy.secure, request) or _fault_of_noise(request):
        return _refused(Rule.SECURE, fault)
    if history.over_budget:
        return _refused(Rule.BUDGET, history.over_budget)
    if policy.approval == "each_run" and history.standing is not Standing.APPROVED:
        command = f"atoll site approve {request.run_id}" + (f" --terms {history.terms}" if history.terms else "")
        return Decision(Outcome.WAITING, Rule.APPROVAL, f"its site's operator approves it with `{command}`")
    return None


def _fault_of_secrecy(policy: SecurePolicy, request: PolicyRequest) -> str:
    if request.kind is Kind.UPLOAD:
        is_plain = policy.required and not request.is_masked
        return "a plain update may not leave: this site demands secure sums" if is_plain else ""
    if request.terms is None:
        what = "a message" if request.action else _WORK[request.kind]
        return f"{what} outside of a secure sum: this site demands one" if policy.required else ""
    if request.action:
        return "a message of a server program has no place in a secure sum"
    if request.codec:
        return f"codec {request.codec!r} in a secure sum: masked values cannot be compressed; allowed: none"
    return terms_fault(policy, request.terms)


def _fault_of_noise(request: PolicyRequest) -> str:
    """Return why a training would be without the noise that its terms promise; empty: it would not."""
    return fault_of_shares(request.local or "", request.terms) if request.kind is Kind.TRAIN else ""


def terms_fault(policy: SecurePolicy, terms: Terms) -> str:
    """Return why a site's policy does not allow a secure sum under these terms; empty: it does.

    A sum of n members with threshold t must be possible:

        max(min_others + 1, 3) <= n <= members_max,    t <= n,    2 t > n + colluders_max

    If the members add noise, it must suffice without that of as many colluders as this site assumes.
    """
    privacy = read_privacy(terms.privacy)
    if privacy is not None and privacy.noise_by == "clients" and privacy.colluders < policy.colluders_max:
        return (
            f"noise that suffices against {count_of(privacy.colluders, 'colluder')}; this site demands "
            f"{policy.colluders_max}, by colluders_max"
        )
    least = max(MEMBERS_MIN, policy.min_others + 1)
    if terms.members_max < least:
        return (
            f"secure sums of at most {count_of(terms.members_max, 'site')}; this site demands {least}, by min_others = "
            f"{policy.min_others}"
        )
    sizes = ((n, terms.threshold_of(n)) for n in range(least, terms.members_max + 1))
    if not any(threshold <= n and 2 * threshold > n + policy.colluders_max for n, threshold in sizes):
        return (
            f"threshold {terms.threshold!r} fits no size of a sum, {least} to {terms.members_max}; this site demands "
            f"more than half of the sites and colluders_max = {policy.colluders_max}"
        )
    return ""


def _object_to_size(policy: SitePolicy, request: PolicyRequest) -> Decision | None:
    if request.action and not _matches(request.action, policy.actions):
        return _refused(Rule.ACTIONS, f"messages of the kind {request.action!r} are not answered here")
    if request.action and policy.metrics != "per_site":
        return _refused(Rule.METRICS, "a reply has metrics of this site alone, which do not leave it")
    if request.kind is Kind.EVALUATE:
        return _refused(Rule.METRICS, "no metrics leave this site") if policy.metrics == "none" else None
    if request.kind is Kind.STATISTICS:
        return _refused(Rule.STATISTICS, "no statistics leave this site") if policy.statistics == "none" else None
    if policy.metrics_only:
        return _refused(Rule.METRICS_ONLY, "only metrics leave this site, no weights")
    most, num_bytes = policy.upload_max_bytes, request.num_bytes
    if num_bytes is not None and num_bytes > most:
        return _refused(
            Rule.UPLOAD_MAX_BYTES, f"an update of {count_of(num_bytes, 'byte')} may not leave; allowed: at most {most}"
        )
    return None


def _object_to_time(policy: SitePolicy, request: PolicyRequest, history: History, now: float) -> Decision | None:
    if not is_open(policy, now):
        hours = policy.hours
        when = f"{', '.join(hours.days)} {hours.begin}-{hours.end} {policy.time_zone}"
        return Decision(Outcome.WAITING, Rule.HOURS, f"this site takes part {when}")
    is_new_round = request.kind in COUNTED and not history.is_counted
    if is_new_round and history.rounds_today >= policy.rounds_per_day:
        detail = (
            f"{count_of(history.rounds_today, 'round was', 'rounds were')} begun today; "
            f"allowed: {policy.rounds_per_day}"
        )
        return Decision(Outcome.WAITING, Rule.ROUNDS_PER_DAY, detail)
    return None


def _refused(rule: Rule, detail: str) -> Decision:
    return Decision(Outcome.REFUSED, rule, detail)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# ---------------------------------------------------------------- time


def day_of(policy: SitePolicy, now: float) -> str:
    """Return the day of an instant, as YYYY-MM-DD in the policy's time zone."""
    return _local(policy, now).date().isoformat()


def is_open(policy: SitePolicy, now: float) -> bool:
    """Return whether an instant is within the hours: begin <= instant < end; a clock that is set back repeats them."""
    local, hours = _local(policy, now), policy.hours
    begin, end, minute = _minutes(hours.begin), _minutes(hours.end), 60 * local.hour + local.minute
    if begin < end:
        return begin <= minute < end and _begins_on(hours, local)
    return (minute >= begin and _begins_on(hours, local)) or (
        minute < end and _begins_on(hours, local - timedelta(days=1))
    )


def _begins_on(hours: Hours, local: datetime) -> bool:
    return DAYS[local.weekday()] in hours.days


def _local(policy: SitePolicy, now: float) -> datetime:
    return datetime.fromtimestamp(now, zone_of(policy.time_zone))


def _minutes(clock: str) -> int:
    return 60 * int(clock[:2]) + int(clock[3:])

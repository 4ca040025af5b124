"""The site's policy as a pure function: each rule, their order, and invariants over sequences of requests."""

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.client.policy.config import DAYS, Day, Hours, SitePolicy, default_policy
from atoll.client.policy.decide import (
    ALLOWED,
    Decision,
    History,
    Kind,
    Outcome,
    PolicyRequest,
    Rule,
    Standing,
    day_of,
    decide,
    is_open,
)

MONDAY = datetime(2026, 5, 4, 12, tzinfo=UTC).timestamp()


def policy(**fields: Any) -> SitePolicy:
    return SitePolicy(**({"tasks": ["digits:*"], "runs": ["*"]} | fields))


def wanted(kind: Kind = Kind.TRAIN, **fields: Any) -> PolicyRequest:
    return PolicyRequest(**({"kind": kind, "run_id": "r-1", "task": "digits:task", "number": 1} | fields))


def answer(rules: SitePolicy, request: PolicyRequest, now: float = MONDAY, **history: Any) -> tuple[Outcome, Rule]:
    decision = decide(rules, request, History(**history), now)
    return decision.outcome, decision.rule


REFUSED = [
    (Rule.TASKS, policy(tasks=["iris:*"]), wanted(), {}),
    (Rule.RUNS, policy(runs=["digits-?"]), wanted(), {}),
    (Rule.REJECTED, policy(), wanted(Kind.EVALUATE), {"standing": Standing.REJECTED}),
    (Rule.METRICS, policy(metrics="none"), wanted(Kind.EVALUATE), {}),
    (Rule.STATISTICS, policy(), wanted(Kind.STATISTICS), {}),
    (Rule.TASKS, policy(tasks=["iris:*"], statistics="merged"), wanted(Kind.STATISTICS), {}),
    (Rule.RUNS, policy(runs=["r-?"], statistics="merged"), wanted(Kind.STATISTICS, run_id="r-statistics"), {}),
    (Rule.ACTIONS, policy(metrics="per_site"), wanted(action="query.stats"), {}),
    (Rule.ACTIONS, policy(metrics="per_site", actions=[]), wanted(action="train"), {}),
    (Rule.METRICS, policy(), wanted(action="train"), {}),
    (Rule.METRICS_ONLY, policy(metrics="per_site", metrics_only=True), wanted(action="evaluate"), {}),
    (Rule.METRICS_ONLY, policy(metrics_only=True), wanted(), {}),
    (Rule.METRICS_ONLY, policy(metrics_only=True), wanted(Kind.UPLOAD, num_bytes=1), {}),
    (Rule.UPLOAD_MAX_BYTES, policy(upload_max_bytes=99), wanted(Kind.UPLOAD, num_bytes=100), {}),
    (Rule.UPLOAD_MAX_BYTES, policy(upload_max_bytes=99), wanted(num_bytes=100), {}),
]
WAITING = [
    (Rule.APPROVAL, policy(approval="each_run"), wanted(), {}),
    (Rule.APPROVAL, policy(approval="each_run", statistics="merged"), wanted(Kind.STATISTICS), {}),
    (Rule.HOURS, policy(statistics="merged", hours=Hours(begin="20:00", end="06:00")), wanted(Kind.STATISTICS), {}),
    (Rule.HOURS, policy(hours=Hours(begin="20:00", end="06:00")), wanted(Kind.EVALUATE), {}),
    (Rule.ROUNDS_PER_DAY, policy(rounds_per_day=3), wanted(), {"rounds_today": 3}),
]
ALLOWING = [
    (policy(approval="each_run"), wanted(), {"standing": Standing.APPROVED}),
    (policy(metrics_only=True), wanted(Kind.EVALUATE), {}),
    (policy(metrics="per_site"), wanted(action="train"), {}),
    (policy(metrics="per_site", actions=["query.*"]), wanted(action="query.stats"), {}),
    (policy(metrics="none"), wanted(), {}),
    (policy(metrics="none"), wanted(Kind.UPLOAD, num_bytes=1), {}),
    (policy(upload_max_bytes=100), wanted(Kind.UPLOAD, num_bytes=100), {}),
    (policy(upload_max_bytes=99), wanted(Kind.EVALUATE, num_bytes=100), {}),
    (policy(rounds_per_day=3), wanted(), {"rounds_today": 2}),
    (policy(rounds_per_day=3), wanted(), {"rounds_today": 3, "is_counted": True}),
    (policy(rounds_per_day=0), wanted(Kind.EVALUATE), {}),
    (policy(tasks=["iris:a", "digits:[st]ask"], runs=["r-*"]), wanted(), {}),
    (default_policy(), wanted(Kind.UPLOAD, num_bytes=2**50), {}),
    (default_policy(), wanted(Kind.STATISTICS), {}),
    (policy(statistics="merged", metrics_only=True, rounds_per_day=0), wanted(Kind.STATISTICS), {}),
    (policy(statistics="merged", metrics="none", upload_max_bytes=0), wanted(Kind.STATISTICS), {}),
]


@pytest.mark.parametrize(("rule", "rules", "request_", "history"), REFUSED)
def test_what_only_the_operator_can_change_is_refused(
    rule: Rule, rules: SitePolicy, request_: PolicyRequest, history: dict[str, Any]
) -> None:
    assert answer(rules, request_, **history) == (Outcome.REFUSED, rule)


@pytest.mark.parametrize(("rule", "rules", "request_", "history"), WAITING)
def test_what_time_or_an_approval_will_change_waits(
    rule: Rule, rules: SitePolicy, request_: PolicyRequest, history: dict[str, Any]
) -> None:
    assert answer(rules, request_, **history) == (Outcome.WAITING, rule)


@pytest.mark.parametrize(("rules", "request_", "history"), ALLOWING)
def test_what_no_rule_objects_to_is_allowed(
    rules: SitePolicy, request_: PolicyRequest, history: dict[str, Any]
) -> None:
    assert answer(rules, request_, **history) == (Outcome.ALLOWED, Rule.NONE_OBJECTS)


def test_the_first_rule_that_objects_gives_its_name() -> None:
    closed = Hours(begin="20:00", end="06:00")
    everything = policy(metrics_only=True, upload_max_bytes=1, rounds_per_day=0, hours=closed, approval="each_run")
    request, approved = wanted(num_bytes=9), {"standing": Standing.APPROVED}
    assert answer(everything, request)[1] is Rule.APPROVAL
    assert answer(everything, request, **approved)[1] is Rule.METRICS_ONLY
    relaxed = everything.model_copy(update={"metrics_only": False})
    assert answer(relaxed, request, **approved)[1] is Rule.UPLOAD_MAX_BYTES
    relaxed = relaxed.model_copy(update={"upload_max_bytes": 9})
    assert answer(relaxed, request, **approved)[1] is Rule.HOURS
    relaxed = relaxed.model_copy(update={"hours": Hours()})
    assert answer(relaxed, request, **approved)[1] is Rule.ROUNDS_PER_DAY


# ---------------------------------------------------------------- properties

names = st.sampled_from(["a", "ab", "abc", "b", "r-1", "r-2"])
patterns = st.lists(st.sampled_from(["*", "a*", "a?", "[ab]", "r-*", "b"]), max_size=3)
clocks = st.tuples(st.integers(0, 23), st.integers(0, 59)).map(lambda t: f"{t[0]:02}:{t[1]:02}")
hours = st.builds(
    lambda days, begin, end: Hours(days=days, begin=begin, end=end if end != begin else "24:00"),
    st.lists(st.sampled_from(DAYS), unique=True),
    clocks,
    clocks,
)
policies = st.builds(
    SitePolicy,
    tasks=patterns,
    runs=patterns,
    approval=st.sampled_from(["none", "each_run"]),
    metrics_only=st.booleans(),
    metrics=st.sampled_from(["per_site", "merged"]),
    statistics=st.sampled_from(["per_site", "merged", "none"]),
    upload_max_bytes=st.integers(0, 10),
    rounds_per_day=st.integers(0, 3),
    time_zone=st.sampled_from(["UTC", "Europe/Berlin", "Asia/Kolkata"]),
    hours=st.one_of(st.just(Hours()), hours),
)
requests = st.builds(
    PolicyRequest,
    kind=st.sampled_from(Kind),
    run_id=names,
    task=names,
    number=st.integers(1, 5),
    num_bytes=st.one_of(st.none(), st.integers(0, 12)),
)
histories = st.builds(
    History, standing=st.sampled_from(Standing), rounds_today=st.integers(0, 4), is_counted=st.booleans()
)
instants = st.integers(int(MONDAY) - 10**7, int(MONDAY) + 10**7).map(float)


@given(policies, requests, histories, instants)
def test_nothing_is_allowed_that_any_rule_forbids(
    rules: SitePolicy, request: PolicyRequest, history: History, now: float
) -> None:
    decision = decide(rules, request, history, now)
    leaves_weights = request.kind in (Kind.TRAIN, Kind.UPLOAD)
    bounds = [
        history.standing is not Standing.REJECTED,
        rules.approval == "none" or history.standing is Standing.APPROVED,
        not (leaves_weights and rules.metrics_only),
        request.kind is not Kind.EVALUATE or rules.metrics != "none",
        request.kind is not Kind.STATISTICS or rules.statistics != "none",
        not leaves_weights or request.num_bytes is None or request.num_bytes <= rules.upload_max_bytes,
        is_open(rules, now),
        not leaves_weights or history.is_counted or history.rounds_today < rules.rounds_per_day,
        rules.tasks != [],
        rules.runs != [],
    ]
    if decision.is_allowed:
        assert decision == ALLOWED
        assert all(bounds)
    elif decision.rule not in (Rule.TASKS, Rule.RUNS):
        assert not all(bounds)


@given(policies, policies, requests, histories, instants)
def test_a_stricter_policy_allows_nothing_more(
    rules: SitePolicy, other: SitePolicy, request: PolicyRequest, history: History, now: float
) -> None:
    stricter = rules.model_copy(
        update={
            "tasks": rules.tasks[1:],
            "runs": rules.runs[:-1] or rules.runs,
            "approval": max(rules.approval, other.approval, key=["none", "each_run"].index),
            "metrics_only": rules.metrics_only or other.metrics_only,
            "metrics": max(rules.metrics, other.metrics, key=["per_site", "merged", "none"].index),
            "upload_max_bytes": min(rules.upload_max_bytes, other.upload_max_bytes),
            "rounds_per_day": min(rules.rounds_per_day, other.rounds_per_day),
            "hours": rules.hours.model_copy(update={"days": rules.hours.days[1:]}),
        }
    )
    if decide(stricter, request, history, now).is_allowed:
        assert decide(rules, request, history, now).is_allowed


@given(hours, instants)
def test_the_hours_are_those_of_a_calendar(span: Hours, now: float) -> None:
    """Compare with an oracle that lays out every span of a fortnight on a calendar."""
    local = datetime.fromtimestamp(now, UTC)
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)

    def at(day: datetime, clock: str) -> datetime:
        return day + timedelta(hours=int(clock[:2]), minutes=int(clock[3:]))

    spans = []
    for offset in range(-7, 8):
        day = midnight + timedelta(days=offset)
        if DAYS[day.weekday()] in span.days:
            end = at(day, span.end)
            spans.append((at(day, span.begin), end if span.end > span.begin else end + timedelta(days=1)))
    assert is_open(policy(hours=span), now) == any(begin <= local < end for begin, end in spans)


def test_hours_and_days_are_of_the_sites_own_time_zone() -> None:
    berlin = policy(time_zone="Europe/Berlin", hours=Hours(days=["mon"], begin="22:00", end="02:00"))

    def at(*clock: int) -> float:
        return datetime(2026, *clock, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()

    assert [is_open(berlin, at(5, 4, hour)) for hour in (21, 22, 23)] == [False, True, True]
    assert [is_open(berlin, at(5, 5, hour)) for hour in (0, 1, 2, 22)] == [True, True, False, False]
    assert not is_open(berlin, at(5, 4, 0)), "the hours before Monday's belong to Sunday"
    assert day_of(berlin, datetime(2026, 5, 4, 22, 30, tzinfo=UTC).timestamp()) == "2026-05-05"
    summer = policy(time_zone="Europe/Berlin", hours=Hours(begin="02:00", end="03:00"))
    [before] = [datetime(2026, 3, 29, 0, 59, 59, tzinfo=UTC).timestamp()]
    assert not is_open(summer, before)
    assert not is_open(summer, before + 1), "the clock goes from 02:00 to 03:00: on that day there are no such hours"


def test_the_refusal_says_what_is_allowed() -> None:
    days: list[Day] = ["mon", "fri"]
    closed = policy(hours=Hours(days=days, begin="20:00", end="06:00"), time_zone="Europe/Berlin")
    assert decide(closed, wanted(), History(), MONDAY) == Decision(
        Outcome.WAITING, Rule.HOURS, "this site takes part mon, fri 20:00-06:00 Europe/Berlin"
    )
    large = decide(policy(upload_max_bytes=99), wanted(num_bytes=100), History(), MONDAY)
    assert large.detail == "an update of 100 bytes may not leave; allowed: at most 99"

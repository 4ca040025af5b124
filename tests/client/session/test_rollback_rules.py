"""The rules against rollback and replay."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.client.session.events import Asked, EvaluationRequest, Invitation, Released, RunEnded, StatisticsRequest
from atoll.client.session.rollback_rules import Refused, Seen, judge, run_of, timed
from atoll.protocol.identity.clock_hint import SKEW_S
from atoll.protocol.vocabulary import FailureReason, ReleaseReason

NOW = 1_000_000.0
D0, D1, D2 = (digit * 64 for digit in "012")


def invite(round_id, version=0, digest=D0, time_left=30.0):
    return Asked(Invitation("r-1", round_id, "t", version, digest, time_left))


def evaluate(version, digest=D0):
    return Asked(EvaluationRequest("r-1", version, "t", digest, 30.0))


def statistics(number, time_left=30.0):
    return Asked(StatisticsRequest("r-1", number, "t", time_left))


def judged(*events, seen=None):
    """Judge events a second apart, and return what was seen after them; the last one may be refused."""
    seen = seen or Seen()
    for number, event in enumerate(events):
        now = NOW + number
        judged = judge(event, int(now * 1e6), seen, now)
        if isinstance(judged, Refused):
            assert number == len(events) - 1
            return judged
        seen = judged
    return seen


def test_an_instant_that_a_wrong_clock_has_let_in_refuses_nothing_once_the_clocks_are_right():
    ahead = NOW + 3600
    seen = judge(invite(3, 2, D1), int(ahead * 1e6), Seen(), ahead)  # both machines were an hour ahead
    assert isinstance(seen, Seen)
    right = judge(invite(4, 2, D1), int(NOW * 1e6), seen, NOW)
    assert isinstance(right, Seen)
    assert right.issued_us == int(NOW * 1e6)
    older = judge(invite(2, 1, D0), int(NOW * 1e6), seen, NOW)
    assert isinstance(older, Refused)
    assert older.reason is FailureReason.ROLLBACK, "rounds still only grow"
    again = judge(invite(4, 2, D1), int(NOW * 1e6), right, NOW)
    assert isinstance(again, Refused)
    assert again.reason is FailureReason.REPLAYED


def test_a_message_of_another_time_names_both_clocks():
    refused = judge(invite(1), int((NOW + 3600) * 1e6), Seen(), NOW)
    assert "signed at 1970-01-12 14:46:40 UTC, and this machine's clock shows 1970-01-12 13:46:40 UTC" in refused.detail


@pytest.mark.parametrize(
    "events",
    [
        (invite(1), invite(1)),  # the client reconnected and is invited again
        (invite(1), invite(2)),  # the round was abandoned
        (invite(1), evaluate(1, D1), invite(2, 1, D1), evaluate(2, D2), evaluate(2, D2)),
        (invite(1), invite(5, 3, D1), invite(5, 3, D1)),
        (evaluate(4), invite(9, 4, D0)),
        (statistics(2), statistics(2), statistics(1), invite(1), statistics(1)),  # numbers begin again with a new state
        (invite(1), Released("r-1", 1, ReleaseReason.ROUND_CLOSED, False), RunEnded("r-1"), None),
    ],
)
def test_what_a_coordinator_says_in_its_life_is_done(events):
    assert isinstance(judged(*events), Seen)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((invite(2), invite(1)), "round 1 is older than round 2"),
        ((invite(1, 1, D1), invite(2, 0, D0)), "version 0 is older than version 1"),
        ((invite(1, 1, D1), evaluate(0)), "version 0 is older than version 1"),
        ((evaluate(2, D2), invite(1, 1, D1)), "version 1 is older than version 2"),
        ((invite(1, 0, D0), invite(2, 0, D1)), "version 0 was 000000000000 before, and is 111111111111 now"),
        ((evaluate(3, D0), evaluate(3, D1)), "version 3 was"),
        ((invite(1, 0, D0), invite(1, 1, D1)), "round 1 began from version 0, not 1"),
    ],
)
def test_what_is_older_or_contradicts_it_is_a_rollback(events, words):
    refused = judged(*events)
    assert refused.reason is FailureReason.ROLLBACK
    assert words in refused.detail
    assert "accept-rollback" in refused.detail


@pytest.mark.parametrize(
    "event", [invite(1), Released("r-1", 1, ReleaseReason.ROUND_CLOSED, False), RunEnded("r-1"), None]
)
def test_a_message_counts_once(event):
    seen = judge(event, int(NOW * 1e6), Seen(), NOW)
    again = judge(event, int(NOW * 1e6), seen, NOW)
    assert again.reason is FailureReason.REPLAYED
    assert judge(event, int(NOW * 1e6) - 1, seen, NOW).reason is FailureReason.REPLAYED
    assert isinstance(judge(event, int(NOW * 1e6) + 1, seen, NOW), Seen)


@pytest.mark.parametrize(
    ("clock", "words"), [(SKEW_S + 1, "5 min 1 s behind this machine's clock"), (-SKEW_S - 1, "5 min 1 s ahead of")]
)
def test_what_was_signed_at_another_time_is_not_done(clock, words):
    refused = judge(invite(1), int(NOW * 1e6), Seen(), NOW + clock)
    assert refused.reason is FailureReason.CLOCK_SKEW
    assert words in refused.detail
    at = NOW + clock * SKEW_S / (SKEW_S + 1)
    assert isinstance(judge(invite(1, time_left=SKEW_S + 1), int(NOW * 1e6), Seen(), at), Seen)


@pytest.mark.parametrize("event", [invite(1, time_left=5.0), Asked(EvaluationRequest("r-1", 1, "t", D0, 5.0))])
def test_what_was_over_when_it_arrived_is_refused_and_leaves_no_trace(event):
    refused = judge(event, int(NOW * 1e6), Seen(), NOW + 290)
    assert refused == Refused(FailureReason.CLOCK_SKEW, "it arrived 285.0 s after its deadline, or a clock was set")
    assert judge(event, int(NOW * 1e6), Seen(), NOW + 5).reason is FailureReason.CLOCK_SKEW
    assert isinstance(judge(event, int(NOW * 1e6), Seen(), NOW + 4.9), Seen)


@pytest.mark.parametrize(("age", "left"), [(0.0, 30.0), (12.0, 18.0), (-12.0, 30.0), (40.0, 0.0)])
def test_the_time_on_the_way_is_over_and_a_clock_that_is_behind_makes_none(age, left):
    assert timed(invite(1), int(NOW * 1e6), NOW + age) == invite(1, time_left=left)
    released = Released("r-1", 1, ReleaseReason.ROUND_CLOSED, False)
    assert timed(released, int(NOW * 1e6), NOW + age) is released


@pytest.mark.parametrize("ahead", [-280.0, -60.0, 60.0, 280.0])
def test_a_difference_of_the_clocks_is_no_time_on_the_way(ahead):
    """The Welcome shows the difference, which an operator may not even notice: up to five minutes are allowed."""
    issued, now = int(NOW * 1e6), NOW + ahead + 2.0  # two seconds on the way
    assert isinstance(judge(invite(1, time_left=3.0), issued, Seen(), now, ahead=ahead), Seen)
    assert judge(invite(1, time_left=2.0), issued, Seen(), now, ahead=ahead).reason is FailureReason.CLOCK_SKEW
    assert timed(invite(1), issued, now, ahead=ahead).request.time_left == pytest.approx(28.0)


def test_a_message_that_a_clock_set_back_makes_older_waits_for_the_clock_and_fails_nothing():
    seen = judge(invite(1), int((NOW + 100) * 1e6), Seen(), NOW)
    refused = judge(invite(2), int(NOW * 1e6), seen, NOW)
    assert refused.reason is FailureReason.CLOCK_SKEW


def test_refused_leaves_no_trace():
    seen = judged(invite(2, 1, D1))
    judge(invite(1), int(NOW * 1e6) + 5_000_000, seen, NOW)
    assert isinstance(judge(invite(2, 1, D1), int(NOW * 1e6) + 1, seen, NOW), Seen)


def test_a_released_round_moves_nothing_but_the_instant():
    seen = judged(invite(2, 1, D1))
    after = judge(Released("r-1", 1, ReleaseReason.ROUND_CLOSED, False), seen.issued_us + 1, seen, NOW)
    assert after == replace(seen, issued_us=seen.issued_us + 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from([D0, D1]), st.booleans()), max_size=12))
def test_whatever_comes_rounds_and_versions_only_grow_and_a_version_has_one_digest(told_):
    seen, done = Seen(), []
    for number, (round_id, version, digest, is_evaluation) in enumerate(told_):
        event = evaluate(version, digest) if is_evaluation else invite(round_id, version, digest)
        judged = judge(event, int(NOW * 1e6) + number + 1, seen, NOW)
        if isinstance(judged, Seen):
            seen = judged
            done.append((round_id, version, digest, is_evaluation))
    rounds = [round_id for round_id, _, _, is_evaluation in done if not is_evaluation]
    assert rounds == sorted(rounds)
    assert [version for _, version, _, _ in done] == sorted(version for _, version, _, _ in done)
    assert len({version for _, version, _, _ in done}) == len({(version, digest) for _, version, digest, _ in done})


def test_which_run_a_message_is_about():
    assert [run_of(event) for event in (invite(1), evaluate(1), RunEnded("r-1"), None)] == ["r-1", "r-1", "r-1", ""]


def test_dishonest_move_41_an_older_round_or_version_is_refused_whatever_was_seen_before():
    for seed in range(20):
        draw = random.Random(f"older {seed}")
        rounds = sorted(draw.sample(range(2, 99), draw.randint(2, 6)))
        versions = sorted(draw.sample(range(1, 99), len(rounds)))
        events = [
            draw.choice([invite(number, version, D1), invite(number, version, D2)])
            for number, version in zip(rounds, versions, strict=True)
        ]
        older = draw.choice(
            [
                invite(draw.randrange(1, rounds[-1]), versions[-1], events[-1].request.model_digest),
                invite(rounds[-1] + 1, draw.randrange(versions[-1]), D1),
                invite(rounds[-1] + 1, versions[-1], D0),  # another model under the newest number
            ]
        )
        refused = judged(*events, older)
        assert isinstance(refused, Refused)
        assert refused.reason is FailureReason.ROLLBACK

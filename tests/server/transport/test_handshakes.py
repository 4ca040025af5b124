"""The classes, the counts and the lines about connections that end before they prove an identity."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from atoll.server.transport.handshakes import (
    LATE_MAX,
    LINE_MAX_S,
    LINE_S,
    SILENT_S,
    WAIT_S,
    FailedHandshake,
    Handshakes,
)

MEMBER, STRANGER = ("192.0.2.1", 4711), ("198.51.100.7", 5000)


def after(port, now):
    """Let the time of all connections be over, with none open, and return the reports."""
    port.look({}, now)
    return port.due(now)


def begin(port, now, *places, had_left=False):
    port.begun(len(places), now)
    port.look(dict.fromkeys(places, had_left), now)


def test_a_member_that_calls_is_in_no_line():
    port = Handshakes()
    begin(port, 1.0, MEMBER)
    port.proven(MEMBER, 1.2)
    assert after(port, 1.0 + WAIT_S) == []
    assert not port.is_watching


def test_a_member_that_was_proven_before_a_look_saw_it_is_in_no_line():
    """Two agents connect at once after a restart: the look for the second was a moment too early."""
    port = Handshakes()
    begin(port, 1.0, MEMBER)
    port.begun(1, 1.01)
    second = (MEMBER[0], 4712)
    port.proven(second, 1.1)
    port.proven(MEMBER, 1.1)
    port.look({MEMBER: False, second: False}, 1.5)
    port.look({MEMBER: False, second: False}, 1.5 + WAIT_S)
    assert after(port, 30.0) == []
    assert not port.is_watching


def test_an_idle_connection_that_is_open_after_the_time_of_its_handshake_is_proven():
    """An agent opens its next connection before its present one is too old, and may not call on it for minutes."""
    port = Handshakes()
    begin(port, 100.0, MEMBER)
    port.look({MEMBER: False}, 100.0 + WAIT_S)
    assert port.due(100.0 + WAIT_S) == []
    assert after(port, 200.0) == []


def test_a_refused_handshake_has_a_line_at_once_and_then_one_with_the_count():
    port = Handshakes()
    begin(port, 100.0, STRANGER)
    (first,) = after(port, 100.0 + WAIT_S)
    assert first.kind is FailedHandshake.REFUSED
    assert first.subject == "a connection from 198.51.100.7 port 5000"
    for number in range(30):
        begin(port, 110.0 + number, (STRANGER[0], 6000 + number))
        assert after(port, 110.0 + number + WAIT_S) == []
    (second,) = port.due(100.0 + WAIT_S + LINE_S)
    assert second.total == 30
    assert second.subject == "30 connections in 50 s (198.51.100.7: 30)"


def test_the_interval_doubles_while_a_class_lasts_and_begins_again_after_a_quiet_one():
    port, told, now = Handshakes(), [], 100.0
    while now < 4 * LINE_MAX_S:
        begin(port, now, (STRANGER[0], int(now)))
        told += [now] * len(after(port, now + WAIT_S))
        now += 10.0
    assert 8 <= len(told) <= 12
    (rest,) = port.due(now + LINE_MAX_S)
    assert rest.total > 1
    quiet = now + 3 * LINE_MAX_S
    begin(port, quiet, STRANGER)
    (first,) = after(port, quiet + WAIT_S)
    assert first.seconds == 0.0
    assert first.total == 1
    begin(port, quiet + 10.0, STRANGER)
    after(port, quiet + 10.0 + WAIT_S)
    assert [report.total for report in port.due(quiet + WAIT_S + LINE_S)] == [1]


def test_a_stranger_that_says_nothing_is_of_its_own_class():
    port = Handshakes()
    begin(port, 100.0, STRANGER)
    port.look({STRANGER: False}, 100.0 + SILENT_S)
    (report,) = after(port, 100.0 + WAIT_S)
    assert report.kind is FailedHandshake.SILENT


def test_a_peer_that_had_left_while_this_process_was_starting_is_late():
    port = Handshakes()
    begin(port, 1.0, MEMBER, had_left=True)
    port.begun(40, 1.1)  # the look was a moment ago, and these have ended before the next
    (report,) = after(port, 1.1 + 2 * WAIT_S)
    assert report.kind is FailedHandshake.LATE
    assert report.total == 41
    assert "40 gone before the address was seen" in report.subject


def test_a_member_that_fails_once_and_is_proven_a_moment_later_is_late_but_not_again_and_again():
    port = Handshakes()
    for number in range(LATE_MAX + 3):
        begin(port, 100.0, (MEMBER[0], 100 + number))
    port.proven((MEMBER[0], 99), 101.0)
    kinds = {report.kind: report.total for report in after(port, 100.0 + WAIT_S)}
    assert kinds == {FailedHandshake.LATE: LATE_MAX, FailedHandshake.REFUSED: 3}


def test_many_members_behind_one_address_may_each_be_late():
    port, members = Handshakes(), [(MEMBER[0], 10 + number) for number in range(5)]
    begin(port, 100.0, *members)
    for member in members:
        port.proven(member, 101.0)
    late = [(MEMBER[0], 100 + number) for number in range(4 * LATE_MAX)]
    begin(port, 102.0, *members, *late)
    port.look(dict.fromkeys(members, False), 103.0 + WAIT_S)
    assert {report.kind for report in port.due(103.0 + WAIT_S)} == {FailedHandshake.LATE}


def test_a_flood_between_two_looks_is_counted_while_it_lasts():
    port, told = Handshakes(), 0
    begin(port, 1.0, MEMBER)
    port.proven(MEMBER, 1.1)
    port.look({MEMBER: False}, 50.0)
    for second in range(200):
        port.begun(20, 100.0 + second)
        port.look({MEMBER: False}, 100.0 + second)
        reports = port.due(100.0 + second)
        assert all(report.kind is FailedHandshake.REFUSED for report in reports)
        told += sum(report.total for report in reports)
    assert told > 2000, "not only when it is over"
    while port.is_watching:
        second += 10
        port.look({MEMBER: False}, 100.0 + second)
        told += sum(report.total for report in port.due(100.0 + second))
    assert told == 4000


def test_a_port_number_that_another_peer_has_later_is_watched_again():
    port = Handshakes()
    begin(port, 100.0, MEMBER)
    port.proven(MEMBER, 100.1)
    assert after(port, 110.0) == []
    begin(port, 200.0, MEMBER)
    (report,) = after(port, 200.0 + WAIT_S)
    assert report.total == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=40))
def test_each_handshake_is_proven_or_counted_once(peers):
    """However looks, handshakes and calls fall: a host, whether a look sees the connection, and whether it calls."""
    port, now, expected = Handshakes(), 0.0, 0
    told = Counter()
    for number, (host, is_seen, is_member) in enumerate(peers):
        place = (f"192.0.2.{host}", 1000 + number)
        port.begun(1, now)
        if is_seen:
            port.look({place: False}, now)
        if is_member:
            port.proven(place, now + 0.1)
        expected += not is_member
        now += 3.0
        port.look({}, now)
        told.update(each.kind for each in port.due(now) for _ in range(each.total))
    for _ in range(3):
        now += LINE_MAX_S
        port.look({}, now)
        told.update(each.kind for each in port.due(now) for _ in range(each.total))
    assert told.total() == expected
    assert not port.is_watching

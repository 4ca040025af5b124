"""The members of a run: connections, candidates, measured times and leases."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.journal.codec import decode, encode
from atoll.server.members.leases import Leases
from atoll.server.members.member import Candidate, Profile
from atoll.server.members.membership import Membership

A, B = ClientId("a"), ClientId("b")


def members(*clients: ClientId) -> Membership:
    membership = Membership()
    for client in clients:
        membership.joined(client, "1", Profile(5, "x"))
    return membership


def test_the_newest_session_of_a_client_is_the_one_that_counts() -> None:
    membership = members(A)
    membership.joined(A, "2", Profile(6, "y"))
    assert membership.num_connected == 1
    assert not membership.disconnected(A, "1")
    assert membership.is_connected(A)
    assert membership.members[A].profile == Profile(6, "y")
    assert membership.disconnected(A, "2")
    assert not membership.is_connected(A)
    assert not membership.disconnected(B, "1")


def test_candidates_are_the_connected_in_order_of_name() -> None:
    membership = members(B, A, ClientId("c"))
    membership.disconnected(ClientId("c"), "1")
    assert [(c.client_id, c.num_examples, c.label) for c in membership.candidates()] == [("a", 5, "x"), ("b", 5, "x")]
    assert list(membership.connected()) == [A, B]


def test_a_lost_client_is_lost_until_it_joins_again() -> None:
    membership = members(A)
    membership.disconnected(A, "1")
    assert membership.lost_because(A) == ""
    membership.lost(A, "lease_expired")
    assert membership.lost_because(A) == "lease_expired"
    membership.joined(A, "2", Profile())
    assert membership.lost_because(A) == ""
    membership.lost(B, "left")
    assert membership.lost_because(B) == ""


def test_measurements_average_by_halves() -> None:
    membership = members(A)
    assert membership.expected_seconds(A) is None
    membership.measured(A, download=1, train=10, upload=3)
    assert membership.expected_seconds(A) == 14
    membership.measured(A, download=3, train=20, upload=1)
    assert membership.expected_seconds(A) == 2 + 15 + 2
    membership.measured(B, download=1, train=1, upload=1)
    assert membership.expected_seconds(B) is None


def test_a_member_is_chosen_and_its_newest_update_is_what_is_known_of_it() -> None:
    membership = members(A, B)
    membership.chosen(A)
    membership.chosen(A)
    membership.learnt(A, RoundId(3), 2.0, 20.0)
    membership.learnt(A, RoundId(2), 9.0, 90.0)  # late, and of an older round
    membership.measured(A, download=1, train=10, upload=3)
    assert membership.candidates() == (
        Candidate(A, 5, "x", 2.0, 20.0, 14.0, RoundId(3), 2),
        Candidate(B, 5, "x", None, 0.0, None, RoundId(0), 0),
    )
    membership.learnt(A, RoundId(4), None, 0.0)
    assert membership.candidates()[0][3:7] == (2.0, 20.0, 14.0, 4)
    membership.learnt(ClientId("stranger"), RoundId(4), 1.0, 1.0)
    membership.chosen(ClientId("stranger"))
    assert len(membership.members) == 2


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), st.sampled_from("jjjjlcgdn"), st.integers(0, 2)),
        max_size=150,
    )
)
def test_candidates_are_what_a_look_at_all_members_would_find(happenings: list[tuple[str, str, int]]) -> None:
    """The queries agree after each change, after many changes, and in a membership that was stored and restored."""
    membership, seldom = Membership(), Membership()
    for number, (name, what, session) in enumerate(happenings):
        client = ClientId(name)
        for one in (membership, seldom):
            match what:
                case "j":
                    one.joined(client, str(session), Profile(session, name))
                case "l":
                    one.disconnected(client, str(session))
                case "g":
                    one.lost(client, "left")
                case "c":
                    one.chosen(client)
                case "d":
                    one.learnt(client, RoundId(number + 1), 1.0, 2.0)
                case _:
                    one.measured(client, download=1, train=number, upload=1)
        there = [(c, m) for c, m in sorted(membership.members.items()) if m.session is not None]
        assert membership.candidates() == tuple(m.as_candidate(c) for c, m in there)
    back = decode(Membership, encode(seldom), "here")
    assert seldom.candidates() == membership.candidates() == back.candidates()
    assert back == seldom == membership
    assert list(back.connected()) == [c.client_id for c in membership.candidates()]


def test_a_member_takes_a_few_hundred_bytes_also_when_it_has_a_history() -> None:
    """The bound is 1 kB, without the client's name."""
    names = [ClientId(f"client-{index:05}") for index in range(5000)]
    tracemalloc.start()
    try:
        membership = Membership()
        for index, name in enumerate(names):
            membership.joined(name, f"session {index}", Profile(index, "label"))
            membership.chosen(name)
            membership.learnt(name, RoundId(1000 + index), index / 7, index / 3)
            membership.measured(name, download=index / 3, train=index / 5, upload=index / 7)
        assert len(membership.candidates()) == 5000
        assert tracemalloc.get_traced_memory()[0] / 5000 < 760
    finally:
        tracemalloc.stop()


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["join", "leave", "lose", "crash"]), st.integers(0, 2)))
)
def test_the_number_of_connected_is_always_right(happenings: list[tuple[str, str, int]]) -> None:
    membership = Membership()
    for name, what, session in happenings:
        match what:
            case "join":
                membership.joined(ClientId(name), str(session), Profile())
            case "leave":
                membership.disconnected(ClientId(name), str(session))
            case "lose":
                membership.lost(ClientId(name), "left")
            case _:
                membership.everyone_disconnected()
        assert membership.num_connected == len(list(membership.connected())) == len(membership.candidates())


def test_a_lease_runs_from_the_last_sign_of_life() -> None:
    leases = Leases(10.0)
    assert leases.next_due is None
    leases.heard(A, 100.0)
    leases.heard(B, 104.0)
    leases.heard(A, 107.0)
    assert leases.next_due == 110.0  # looked at then, and put back
    assert leases.expired(110.0) == []
    assert leases.expired(114.0) == [B]
    assert leases.expired(116.9) == []
    assert leases.expired(117.0) == [A]
    assert leases.expired(200.0) == []
    assert leases.next_due is None


def test_the_bytes_of_a_transfer_renew_a_lease_and_bring_nobody_back() -> None:
    leases = Leases(10.0)
    leases.heard(A, 0.0)
    leases.renew(A, 8.0)
    assert leases.expired(15.0) == []
    assert leases.expired(18.0) == [A]
    leases.renew(A, 19.0)
    assert (leases.heard_at(A), leases.expired(100.0)) == (0.0, [])


def test_who_is_expected_has_its_time_and_then_a_lease_of_the_usual_length() -> None:
    """After a restart, an agent may still have to start; once it has connected, silence is what it always was."""
    leases = Leases(10.0)
    for client in (A, B):
        leases.expect(client, 300.0)
    assert leases.heard_at(A) == 0.0
    leases.heard(A, 50.0)
    assert leases.expired(59.9) == []
    assert leases.expired(60.0) == [A]
    assert leases.expired(299.9) == []
    assert leases.expired(300.0) == [B]
    assert leases.next_due is None


def test_nothing_is_expected_of_a_client_that_said_goodbye() -> None:
    leases = Leases(10.0)
    leases.heard(A, 100.0)
    leases.forget(A)
    assert leases.expired(200.0) == []
    leases.heard(A, 201.0)
    assert leases.expired(211.0) == [A]


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from("abc"), st.sampled_from(["heard", "forget"])), max_size=60))
def test_everyone_who_is_silent_for_a_lease_is_named_once(happenings: list[tuple[float, str, str]]) -> None:
    """The reference is a plain dictionary of the last sign of life of each client."""
    leases, heard, now = Leases(20.0), dict[ClientId, float](), 0.0
    for pause, name, what in happenings:
        now += pause
        due = sorted(client for client, at in heard.items() if at + 20.0 <= now)
        assert sorted(leases.expired(now)) == due
        for client in due:
            del heard[client]
        if what == "heard":
            leases.heard(ClientId(name), now)
            heard[ClientId(name)] = now
        else:
            leases.forget(ClientId(name))
            heard.pop(ClientId(name), None)
        assert not heard or (leases.next_due is not None and leases.next_due <= min(heard.values()) + 20.0)


def test_who_declines_is_on_the_line_and_no_candidate_until_it_joins_again() -> None:
    membership = members(A, B)
    membership.declined(A)
    assert membership.has_declined(A)
    assert [c.client_id for c in membership.candidates()] == list(membership.available()) == [B]
    assert list(membership.connected()) == [A, B], "it may still evaluate"
    assert (membership.num_connected, membership.num_available) == (2, 1)
    membership.joined(A, "1", Profile(5, "x"))
    assert not membership.has_declined(A)
    assert membership.num_available == len(membership.candidates()) == 2


def test_who_declines_and_leaves_is_not_counted_twice() -> None:
    membership = members(A, B)
    for leave in (
        lambda: membership.disconnected(A, "1"),
        lambda: membership.lost(A, "left"),
        membership.everyone_disconnected,
    ):
        membership.joined(A, "1", Profile())
        membership.declined(A)
        leave()
        assert membership.num_available == membership.num_connected == len(membership.candidates())
        membership.declined(A)  # what it said last comes after it has gone
        assert membership.num_available == membership.num_connected == len(membership.candidates())


def test_who_declines_is_remembered_by_a_snapshot() -> None:
    membership = members(A, B)
    membership.declined(A)
    back = decode(Membership, encode(membership), "here")
    assert back == membership
    assert back.has_declined(A)
    assert list(back.available()) == [B]

"""The limits of one caller: calls, refusals, patience with its bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.wire.channel import CHUNK_BYTES
from atoll.server.transfers.timeouts import FLOOR_S, Patience
from atoll.server.transport import limits
from atoll.server.transport.call_limits import place_of
from atoll.server.transport.limits import CALLS_BURST, CALLS_PER_S, STRIKES_MAX, Bucket, Callers

FLOOR = 16 * 1024


def test_open_calls_are_limited_for_each_caller():
    callers = Callers(3)
    assert [callers.begin("client north", 0.0) for _ in range(3)] == ["", "", ""]
    assert callers.begin("client north", 0.0) == (
        "client north has 3 open calls; allowed: 3 at once, wait for one to end"
    )
    assert callers.begin("client south", 0.0) == ""
    callers.end("client north")
    assert callers.begin("client north", 0.0) == ""


def test_new_calls_are_limited_to_a_rate():
    callers = Callers(3)

    def begun(count, now):
        for _ in range(count):
            if fault := callers.begin("north", now):
                return fault
            callers.end("north")
        return ""

    assert begun(CALLS_BURST, 0.0) == ""
    assert begun(1, 0.0) == "north begins more than 200 calls a second (600 at once): wait a while"
    assert begun(int(CALLS_PER_S), 1.0) == ""
    assert begun(1, 1.0) != ""


def test_some_refused_calls_are_forgiven():
    callers = Callers(3)
    assert [callers.strike("north", 0.0) for _ in range(STRIKES_MAX)] == [False] * STRIKES_MAX
    assert callers.strike("north", 0.0)
    assert not callers.strike("south", 0.0)
    assert not callers.strike("north", 10.0)


def test_many_names_cost_no_memory_and_open_calls_are_not_forgotten(monkeypatch):
    monkeypatch.setattr(limits, "CALLERS_MAX", 100)
    callers = Callers(1)
    assert callers.begin("north", 0.0) == ""
    for number in range(1000):
        assert callers.begin(f"name {number}", 0.0) == ""
        callers.end(f"name {number}")
    assert len(callers._known) <= 101
    assert callers.begin("north", 0.0) != "", "its call is still open"
    callers.end("north")


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_bucket_gives_no_more_than_its_burst_and_its_rate(times):
    bucket, now, taken = Bucket(2.0, 5.0), 0.0, 0
    for step in times:
        now += step
        taken += bucket.take(now)
    assert taken <= 5 + 2 * sum(times) + 1e-6


def test_a_clock_that_runs_backward_gives_nothing():
    bucket = Bucket(1.0, 2.0)
    assert [bucket.take(100.0 - n) for n in range(10)].count(True) == 2
    assert [bucket.take(100.0) for _ in range(3)].count(True) == 0


# ---------------------------------------------------------------- uploads


@given(st.floats(1.0, 100.0), st.integers(1, CHUNK_BYTES))
@settings(deadline=None)
def test_an_upload_at_the_floor_or_faster_is_never_ended(times_floor, chunk):
    patience = Patience(FLOOR, 600.0)
    for _ in range(100):
        waited = chunk / (FLOOR * times_floor)
        assert waited <= patience.left
        patience.received(chunk, waited)


@given(st.floats(0.01, 0.9), st.integers(4096, CHUNK_BYTES))
@settings(deadline=None, max_examples=30)
def test_a_slower_upload_is_ended_in_bounded_time(times_floor, chunk):
    patience, spent = Patience(FLOOR, 600.0), 0.0
    waited = chunk / (FLOOR * times_floor)
    while waited <= patience.left:
        patience.received(chunk, waited)
        spent += waited
    most = FLOOR_S + CHUNK_BYTES / FLOOR
    assert spent * (1 - times_floor) <= most + 1e-6


def test_one_byte_now_and_then_is_not_enough():
    patience, spent = Patience(FLOOR, 600.0), 0.0
    while patience.left >= 5.0:
        patience.received(1, 5.0)
        spent += 5.0
    assert spent <= FLOOR_S + CHUNK_BYTES / FLOOR


def test_patience_that_fast_bytes_earn_is_bounded():
    patience = Patience(FLOOR, 600.0)
    for _ in range(1000):
        patience.received(CHUNK_BYTES, 0.0)
    assert patience.left == pytest.approx(FLOOR_S + CHUNK_BYTES / FLOOR)


def test_without_a_floor_only_silence_counts():
    patience = Patience(0, 600.0)
    for _ in range(100):
        patience.received(1, 599.0)
        assert patience.left == 600.0


@pytest.mark.parametrize(
    ("peer", "where"),
    [
        ("ipv4:127.0.0.1:4711", ("127.0.0.1", 4711)),
        ("ipv6:%5B::1%5D:4711", ("::1", 4711)),
        ("ipv6:[2001:db8::1]:443", ("2001:db8::1", 443)),
        ("unix:/tmp/socket", None),
        ("", None),
    ],
)
def test_a_peer_is_found_as_grpc_names_it(peer, where):
    assert place_of(peer) == where

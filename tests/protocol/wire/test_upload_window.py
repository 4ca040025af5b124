"""The window of uploads: its size, and that no sender waits for ever."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.wire.channel import CHUNK_BYTES, MIB, UPLOAD_WINDOW_BYTES
from atoll.protocol.wire.upload_window import UPLOADS_BYTES, WINDOW_BYTES_MIN, Confirmations, chunk_of, window_of

WINDOWS = st.integers(0, 200).map(window_of)


@given(st.integers(0, 100_000))
def test_all_uploads_together_have_their_bound_in_flight_unless_they_are_very_many(num_uploads):
    window = window_of(num_uploads)
    assert WINDOW_BYTES_MIN <= window <= UPLOAD_WINDOW_BYTES
    assert num_uploads * window <= max(UPLOADS_BYTES, num_uploads * WINDOW_BYTES_MIN)
    assert window >= window_of(num_uploads + 1)


def test_a_few_uploads_have_the_whole_window_and_full_chunks():
    assert window_of(0) == window_of(1) == window_of(4) == UPLOAD_WINDOW_BYTES
    assert window_of(16) == MIB
    assert chunk_of(UPLOAD_WINDOW_BYTES) == CHUNK_BYTES
    assert chunk_of(MIB) == MIB // 4


@given(
    begin=st.integers(0, 3 * MIB),
    total=st.integers(1, 12 * MIB),
    windows=st.lists(WINDOWS, min_size=1, max_size=40),
    paces=st.lists(st.integers(1000, CHUNK_BYTES), min_size=1, max_size=5),
)
def test_a_sender_that_keeps_within_what_it_was_told_always_comes_to_the_end(begin, total, windows, paces):
    """Change the window at random while the sender sends all it may and the receiver takes it, in turns."""
    total += begin
    windows, which = [*windows], 0
    confirmations, told = Confirmations(begin, windows[0]), windows[0]
    sent = taken = confirmed = begin
    while taken < total:
        flying = []
        while sent < total:
            chunk = min(chunk_of(told), paces[len(flying) % len(paces)])
            if sent + chunk - confirmed > told:
                break
            flying.append(min(chunk, total - sent))
            sent += flying[-1]
        assert flying or confirmed < taken, "both wait"
        before = confirmed
        for size in flying:
            taken += size
            if confirmations.is_due(taken, size):
                which += 1
                told, confirmed = windows[which % len(windows)], taken
                confirmations.said(taken, told)
        assert taken == total or confirmed > before, "nothing was confirmed, and the sender may send no more"

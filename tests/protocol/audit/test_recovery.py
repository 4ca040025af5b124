"""The end of a file of the audit log: ends that a crash can have torn, and damage that no crash can have done."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.audit.chain import Event, Head, checkpoint_line, event_line
from atoll.protocol.audit.recovery import TORN_BYTES_MAX, End, find_end, is_torn, last_line

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
AT = "2026-01-31T12:00:00.000000Z"
EVENT = Event(AT, "ada", "operator", "run.stop", "run-1", "no time", {"model": "a" * 64})


def lines_of(num_events, head, *, sign):
    lines = []
    for _ in range(num_events):
        line, head = event_line(EVENT, head)
        lines.append(line)
    if sign:
        line, head = checkpoint_line(AT, head, KEY)
        lines.append(line)
    return lines, head


BEGUN, MIDDLE = lines_of(3, Head(), sign=True)
MORE, SIGNED_AT = lines_of(3, MIDDLE, sign=True)
TAIL, LAST = lines_of(3, SIGNED_AT, sign=False)
SIGNED, REST = b"".join(BEGUN + MORE), b"".join(TAIL)


def end_of(data, start=Head()):  # noqa: B008 - it is never changed
    return find_end(data, start, PUBLIC)


def test_a_sound_file_ends_behind_its_last_line():
    assert end_of(SIGNED + REST) == End(LAST, len(SIGNED + REST))
    assert LAST.unsigned == 3
    assert end_of(b"", SIGNED_AT) == End(SIGNED_AT, 0)
    assert end_of(REST, SIGNED_AT) == End(LAST, len(REST))


@given(st.integers(0, len(REST)), st.lists(st.tuples(st.integers(0, len(REST)), st.integers(1, 600)), max_size=4))
def test_what_a_crash_leaves_behind_the_last_checkpoint_is_torn_and_no_damage(num_bytes, holes):
    rest = bytearray(REST)
    for at, length in holes:
        rest[at : at + length] = bytes(len(rest[at : at + length]))
    end = end_of(SIGNED + rest[:num_bytes])
    assert end.damage == ""
    assert len(SIGNED) <= end.num_bytes <= len(SIGNED) + num_bytes
    assert (SIGNED + REST).startswith((SIGNED + rest)[: end.num_bytes])


@given(st.integers(0, 8 * (len(SIGNED) - 1) - 1))  # that the last one's end is missing a crash can have done
def test_no_bit_that_a_checkpoint_signs_is_ever_cut_off(bit):
    flipped = bytearray(SIGNED)
    flipped[bit // 8] ^= 1 << bit % 8
    assert end_of(bytes(flipped)).damage != ""


@given(st.integers(0, len(BEGUN + MORE) - 2))
def test_no_line_before_a_checkpoint_can_be_missed(number):
    lines = BEGUN + MORE
    end = end_of(b"".join(lines[:number] + lines[number + 1 :]) + REST)
    assert end.damage != ""
    assert (end.head.seq, end.head.digest) == (LAST.seq, LAST.digest), "the next file goes on with the chain"


@settings(max_examples=300)
@given(st.binary(min_size=1, max_size=400).filter(lambda data: data.strip(b"\0")))
def test_no_garbage_was_left_by_a_crash(data):
    torn = is_torn(data)
    begun = data.lstrip(b"\0") != data or b'{"action":"'.startswith(data[:11]) or b'{"key":"'.startswith(data[:8])
    assert not torn or begun


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        b"garbage\n",
        b"{}\n",
        b"\n",
        TAIL[1] + TAIL[2],
        TAIL[0] + b"{}\n",
        TAIL[0].replace(b"ada", b"eve") + TAIL[1],
        lines_of(0, SIGNED_AT, sign=True)[0][0].replace(b'"signature":"', b'"signature":"ff'),
        b"\0" * 100 + b"\n" + b"garbage\n",
        b"\0" * 100 + b"\xff",
        b"\0" * (TORN_BYTES_MAX + 1),
    ],
)
def test_what_no_crash_leaves_is_damage(data):
    end = end_of(SIGNED + data)
    assert end.damage.startswith("line ")
    assert end.head.seq > SIGNED_AT.seq


def test_a_checkpoint_of_another_key_proves_nothing():
    other = Ed25519PrivateKey.generate()
    line, _ = checkpoint_line(AT, SIGNED_AT, other)
    assert end_of(SIGNED + line).damage != ""


def test_a_file_under_another_ones_number_is_damage():
    assert end_of(SIGNED, Head(500)).damage != ""
    assert end_of(SIGNED, Head(500)).head.seq > 500


def test_a_number_that_no_file_can_have_come_to_is_not_gone_on_with():
    line, _ = event_line(EVENT, Head(999_999_999_999))
    assert end_of(SIGNED + line).head.seq < 10_000


def test_the_last_line_is_read_alone():
    assert last_line(SIGNED).seq == SIGNED_AT.seq - 1
    assert (last_line(b""), last_line(SIGNED[:-1])) == (None, None)

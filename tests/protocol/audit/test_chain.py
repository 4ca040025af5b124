"""The lines of the audit log: a reader finds sound exactly what a writer writes."""

import json
import random
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.audit.chain import (
    EVENTS_MAX,
    FAULTS_MAX,
    GENESIS,
    LINE_BYTES_MAX,
    TEXT_MAX,
    Checkpoint,
    Event,
    Head,
    LineFault,
    Verifier,
    checkpoint_line,
    event_line,
    instant,
    read_line,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
AT = "2026-01-31T12:00:00.000000Z"
EVENT = Event(AT, "ada", "operator", "run.stop", "run-1", "no time", {"model": "a" * 64})


def log_of(num_events, *, every=8, key=KEY, head=None):
    """Return the lines of some events, signed at intervals and at the end, and the head of the log."""
    lines, head = [], head or Head()
    for number in range(num_events):
        line, head = event_line(replace(EVENT, object=f"run-{number}"), head)
        lines.append(line)
        if head.unsigned == every or number == num_events - 1:
            line, head = checkpoint_line(AT, head, key)
            lines.append(line)
    return lines, head


def verified(lines, **how):
    verifier = Verifier(**{"key": PUBLIC, **how})
    for number, line in enumerate(lines, 1):
        verifier.feed(line, f"log:{number}")
    verifier.finish()
    return verifier


def faults(lines, **how):
    return [str(fault) for fault in verified(lines, **how).faults]


def test_a_log_is_sound_and_its_reader_says_what_is_in_it():
    lines, head = log_of(20)
    found = verified(lines)
    assert found.faults == []
    assert (found.events, found.checkpoints, found.unsigned) == (20, 3, 0)
    assert (found.first.seq, found.newest.seq) == (0, head.seq - 1)
    assert found.last_checkpoint.checkpoint == Checkpoint(22, read_line(lines[-1]).prev)


@pytest.mark.parametrize("event", [EVENT, replace(EVENT, on_behalf_of="olga@example.org")])
def test_a_line_is_read_as_it_was_written(event):
    data, head = event_line(event, Head())
    line = read_line(data)
    assert line.event == event
    assert (b"on_behalf_of" in data) == bool(event.on_behalf_of)
    assert (line.seq, line.prev, line.digest, head) == (0, GENESIS, head.digest, Head(1, line.digest, 1))
    assert json.loads(data)["time"] == AT


def test_the_hash_is_that_of_the_line_before_and_the_line():
    """Recompute the chain by hand, following the module's docstring."""
    import hashlib

    first, head = event_line(EVENT, Head())
    second, _ = event_line(EVENT, head)
    assert json.loads(second)["prev"] == hashlib.sha256(bytes(32) + first.rstrip(b"\n")).hexdigest()


TEXTS = st.text(max_size=250)


@settings(max_examples=50, deadline=None)
@given(TEXTS, TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=5), st.floats(0, 4e9))
def test_whatever_an_event_says_is_one_line_that_can_be_read(actor, outcome, digests, at):
    event = Event(instant(at), actor, "client", "call.refuse", "", outcome, digests)
    data, _ = event_line(event, Head())
    assert len(data) <= LINE_BYTES_MAX
    assert data.count(b"\n") == 1
    assert read_line(data).event.outcome[:100] == outcome[:100]


def test_the_longest_event_is_a_line_that_can_be_read():
    wide = "\U0001f3dd" * 300  # twelve bytes each in ASCII
    head = Head(10**17, "a" * 64)
    data, _ = event_line(Event(AT, *[wide] * 5, {f"{n}{wide}": wide for n in range(9)}, wide), head)
    assert len(data) <= LINE_BYTES_MAX
    assert read_line(data).event.actor == "\U0001f3dd" * (TEXT_MAX - 3) + "..."


# ---------------------------------------------------------------- what was done to it


@pytest.mark.slow
def test_ten_thousand_mutations_are_all_found():
    """Change a log that ends with a checkpoint: one bit, one line deleted or repeated, or two lines swapped."""
    random_ = random.Random(5)
    lines, _ = log_of(8, every=4)
    data = b"".join(lines)
    unseen = []
    for trial in range(10_000):
        kind = trial % 4
        if kind == 0:
            bit = random_.randrange(8 * len(data))
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            mutant, what = _split(bytes(flipped)), f"bit {bit}"
        else:
            mutant = list(lines)
            one, other = random_.sample(range(len(lines)), 2)
            what = f"kind {kind} of {one}, {other}"
            if kind == 1:
                del mutant[min(one, len(lines) - 2)]  # that the end was cut off only another's memory shows
            elif kind == 2:
                mutant[one], mutant[other] = mutant[other], mutant[one]
            else:
                mutant.insert(other, mutant[one])
        if not has_fault(mutant):
            unseen.append(what)
    assert unseen == []


def has_fault(lines):
    """Return whether a log has a fault, without looking for more after the first."""
    verifier = Verifier(key=PUBLIC)
    for line in lines:
        verifier.feed(line, "log")
        if verifier.faults:
            return True
    return bool(verifier.finish())


def _split(data):
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + [part for part in parts[-1:] if part]


@pytest.mark.slow
def test_every_bit_of_the_last_checkpoint_counts():
    lines, _ = log_of(3)
    last = lines[-1]
    for bit in range(8 * len(last)):
        flipped = bytearray(last)
        flipped[bit // 8] ^= 1 << bit % 8
        assert verified([*lines[:-1], *_split(bytes(flipped))]).faults, bit


def test_it_is_said_which_line_it_is():
    lines, _ = log_of(20)
    changed = lines[4].replace(b"run-4", b"run-5")
    assert faults([*lines[:4], changed, *lines[5:]]) == ["log:5: changed: line 5 does not follow from line 4"]
    assert faults(lines[:4] + lines[5:]) == ["log:5: line 4 is missing"]
    assert faults(lines[:4] + lines[9:]) == ["log:5: lines 4 to 8 are missing"]
    assert faults([*lines[:4], lines[5], lines[4], *lines[6:]]) == ["log:6: line 4 is out of order"]
    assert faults([*lines[:4], lines[3], *lines[4:]]) == ["log:5: line 3 is repeated"]
    assert faults([*lines[:-1], lines[-1][:-20]]) == ["log:23: changed or unfinished: its end is missing"]
    assert faults(lines[2:]) == ["log:1: lines 0 to 1 are missing"]
    assert faults([*lines[:4], b" " + lines[4], *lines[5:]])[0] == "log:5: changed or unfinished: not canonical JSON"


def test_some_files_of_a_log_may_begin_anywhere():
    lines, _ = log_of(20)
    assert faults(lines[11:], whole=False) == []


def test_what_was_written_anew_without_the_key_is_found():
    """Recompute all hashes of a changed log, whose signatures then do not fit."""
    other = Ed25519PrivateKey.generate()
    anew, _ = log_of(20, key=other)
    assert len(faults(anew)) == 3
    assert all("another key" in fault for fault in faults(anew))
    lines, _ = log_of(20)
    stolen = [line.replace(other.public_key().public_bytes_raw().hex().encode(), PUBLIC.encode()) for line in anew]
    assert any("signature of checkpoint 8 is wrong" in fault for fault in faults(stolen))
    assert faults(lines, key=None) == []
    assert len(faults([*lines[:9], *log_of(5, key=other, head=log_of(8)[1])[0]], key=None)) == 1, "one key for all"


def test_what_was_written_anew_without_checkpoints_is_found():
    lines, head = log_of(0)
    for _ in range(EVENTS_MAX + 1):
        line, head = event_line(EVENT, head)
        lines.append(line)
    assert faults(lines) == [f"log:{EVENTS_MAX + 1}: more than 256 events in a row are signed by no checkpoint"]
    assert verified(lines[:-1]).unsigned == EVENTS_MAX


def test_that_the_end_was_cut_off_shows_who_remembers_a_checkpoint():
    lines, _ = log_of(20)
    known = read_line(lines[17]).checkpoint
    assert faults(lines[:17]) == []
    assert faults(lines, expected=[known]) == []
    (fault,) = faults(lines[:17], expected=[known])
    assert fault.startswith(f"the end: checkpoint 17:{known.digest} is not in this log")
    anew, _ = log_of(20, every=5)
    assert faults(anew, expected=[known]) != []


def test_a_checkpoint_is_remembered_as_text():
    checkpoint = Checkpoint(17, "ab" * 32)
    assert Checkpoint.parse(str(checkpoint)) == checkpoint
    for text in (
        "",
        "17",
        "17:ab",
        "-1:" + "ab" * 32,
        "17:" + "AB" * 32,
        "1" * 5000 + ":" + "ab" * 32,
        "٣:" + "ab" * 32,
    ):
        with pytest.raises(ValueError, match="allowed is SEQ:DIGEST"):
            Checkpoint.parse(text)


@given(st.binary(max_size=300))
def test_no_bytes_are_more_than_no_line(data):
    with pytest.raises(LineFault):
        read_line(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("seq", -1), ("seq", True), ("seq", 1.0), ("seq", "1"), ("prev", "A" * 64), ("prev", 5), ("prev", "é" * 64)],
        *[
            ("time", "yesterday"),
            ("time", AT.replace("Z", "")),
            ("actor", None),
            ("digests", []),
            ("digests", {"a": 1}),
            ("on_behalf_of", 1),
            ("on_behalf_of", ""),
            ("on_behalf_off", "olga"),
        ],
    ],
)
def test_a_line_of_other_types_is_refused(name, value):
    said = json.loads(event_line(EVENT, Head())[0]) | {name: value}
    with pytest.raises(LineFault):
        read_line(json.dumps(said, sort_keys=True, separators=(",", ":")).encode() + b"\n")


def test_the_faults_are_bounded_and_counted():
    found = verified([b"{}\n"] * 1000)
    assert (len(found.faults), found.num_faults) == (FAULTS_MAX, 1000)

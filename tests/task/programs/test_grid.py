"""The grid of a server program over a link that answers from this process: what it reads, stores and refuses."""

import errno
import hashlib
import os

import numpy as np
import pytest

from atoll.task.content import Content, to_tensors
from atoll.task.programs.grid import MAPPED_MIN, Grid, Outgoing
from atoll.task.programs.main import _conclusion
from atoll.tensors import safetensors_file


class Answers:
    """A link whose calls have given answers."""

    def __init__(self, **answers):
        self._answers = answers

    def call(self, op, **fields):
        answer = self._answers[op]
        return answer(**fields) if callable(answer) else answer


def row(path, content, number=1):
    """Write the file of a reply as the coordinator does, and return its row."""
    tensors = to_tensors(content)
    path.write_bytes(b"".join(array.tobytes() for array in tensors.values()))
    sizes = [[name, array.nbytes] for name, array in tensors.items()]
    of = {"number": number, "node": f"n{number}", "kind": "train", "group": "", "place": number - 1, "ended_at": 0.0}
    return of | {"error": "", "path": str(path), "tensors": sizes}


def pull(rows):
    return Grid(Answers(pull={"replies": rows})).pull([each["number"] for each in rows])


def test_small_replies_hold_no_descriptor_and_large_ones_come_back(tmp_path):
    small = [row(tmp_path / str(n), Content({"n": n}, {"w": np.full(3, n)}), n) for n in range(1, 51)]
    large = row(tmp_path / "large", Content(None, {"w": np.arange(MAPPED_MIN // 8 + 1)}), 51)
    before = len(os.listdir("/proc/self/fd"))
    replies = pull([*small, large])
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert [reply.error for reply in replies] == [""] * 51
    assert [reply.content.arrays["w"][0] for reply in replies[:50]] == list(range(1, 51))
    assert replies[50].content.arrays["w"][-1] == MAPPED_MIN // 8


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_a_fault_of_this_machine_is_no_error_of_a_node(tmp_path, monkeypatch, code):
    rows = [row(tmp_path / "reply", Content(None, {"w": np.zeros(MAPPED_MIN)}))]

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(np, "memmap", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        pull(rows)


def test_a_reply_that_is_not_sound_is_an_error_of_its_node(tmp_path):
    rows = [row(tmp_path / str(n), Content(n, {"w": np.zeros(4)}), n) for n in (1, 2)]
    (tmp_path / "1").write_bytes((tmp_path / "1").read_bytes()[:-1])
    bad, good = pull(rows)
    assert bad.error.startswith("its reply cannot be read: ")
    assert good.content.plain == 2


@pytest.mark.parametrize("is_changed", [False, True])
def test_an_array_that_is_changed_after_its_digest_is_not_stored(tmp_path, is_changed):
    steady, live, path = np.ones(5), np.zeros(5), tmp_path / "content.safetensors"

    def content(pieces, piece_bytes):
        live[:] += is_changed  # as another thread would
        return {"digest": "d", "path": str(path), "pieces": pieces}

    grid = Grid(Answers(content=content, send={"numbers": [1]}))
    messages = [Outgoing("a", "train", Content(None, {"steady": steady, "live": live}))]
    if is_changed:
        with pytest.raises(ValueError, match=r"^live: changed by another thread while being sent"):
            grid.push(messages)
        assert list(tmp_path.iterdir()) == []
    else:
        assert grid.push(messages) == [1]
        assert list(tmp_path.iterdir()) == [path]
        stored = safetensors_file.read(path)["000002"]
        assert hashlib.sha256(stored).digest() == hashlib.sha256(live).digest()


@pytest.mark.parametrize("field", ["node", "group"])
@pytest.mark.parametrize("text", ["\ud800", "x" * 257])
def test_a_text_that_the_journal_cannot_have_is_refused_by_name(field, text):
    with pytest.raises(ValueError, match=f"^{field}: got "):
        Outgoing(**{"node": "a", "kind": "train", "content": Content()} | {field: text})
    assert Outgoing("a", "train", Content(), "Runde 3 \U0001f600\n").group


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_time_to_live_that_is_no_time_is_refused_by_name(seconds):
    with pytest.raises(ValueError, match=f"^ttl: got {seconds} s; allowed: a positive and finite time"):
        Outgoing("a", "train", Content(), ttl=seconds)


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
def test_a_timeout_that_is_no_time_is_refused_by_name(seconds):
    with pytest.raises(ValueError, match=f"^timeout: got {seconds} s; allowed: None, or a time of at least 0"):
        Grid(Answers()).send([Outgoing("a", "train", Content())], timeout=seconds)


def test_a_lone_surrogate_in_an_error_of_the_program_is_escaped():
    assert "\\ud800" in _conclusion(ValueError("\ud800")).encode().decode()

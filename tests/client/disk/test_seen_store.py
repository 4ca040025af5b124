"""The store of the newest round and version that was seen of each run, across crashes."""

import json

import pytest

from atoll.client.disk import seen_store
from atoll.client.disk.seen_store import Memory
from atoll.client.session.rollback_rules import Seen
from atoll.protocol.settings import ConfigError

OLD, NEW = Seen(5, 1, 0, 0, "a" * 64), Seen(9, 2, 1, 1, "b" * 64)


def test_the_newest_of_each_run_is_known_after_a_restart(tmp_path):
    path = tmp_path / "seen"
    this = Memory(path)
    assert this.seen("r-1") == Seen()
    for run_id, seen in (("r-1", OLD), ("r-2", OLD), ("", Seen(3)), ("r-1", NEW)):
        this.note(run_id, seen)
        this.save()
    assert Memory(path).runs() == {"r-1": NEW, "r-2": OLD, "": Seen(3)}


def test_only_what_was_saved_is_known_after_a_crash(tmp_path):
    path = tmp_path / "seen"
    this = Memory(path)
    this.note("r-1", OLD)
    assert this.seen("r-1") == OLD
    assert Memory(path).runs() == {}
    this.save()
    this.save()
    assert path.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("num_bytes", [1, 20, 80])
def test_a_torn_line_is_written_over(tmp_path, num_bytes):
    path = tmp_path / "seen"
    this = Memory(path)
    this.note("r-1", OLD)
    this.save()
    path.write_bytes(path.read_bytes() + path.read_bytes()[:num_bytes])
    after = Memory(path)
    assert after.runs() == {"r-1": OLD}
    after.note("r-1", NEW)
    after.save()
    assert Memory(path).runs() == {"r-1": NEW}


LINE = {"run": "r", "issued_us": 1, "round_id": 1, "base_version": 0, "version": 0, "digest": ""}


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"nonsense",
        b"[" * 100_000,
        *(json.dumps(LINE | wrong).encode() for wrong in ({"round_id": -1}, {"digest": "x"}, {"more": 1}, {"run": 3})),
    ],
)
def test_damage_is_named_and_not_passed_over(tmp_path, line):
    path = tmp_path / "seen"
    path.write_bytes(json.dumps(LINE).encode() + b"\n" + line + b"\n")
    with pytest.raises(ConfigError, match=r"seen, line 2: .*put it back from a backup"):
        Memory(path)


def test_a_long_file_is_written_anew(tmp_path, monkeypatch):
    path = tmp_path / "seen"
    this = Memory(path)
    for number in range(5):
        this.note("r-1", Seen(number + 1))
        this.save()
    monkeypatch.setattr(seen_store, "LINES_MIN", 3)
    monkeypatch.setattr(seen_store, "LINES_PER_RUN", 2)
    again = Memory(path)
    assert path.read_bytes().count(b"\n") == 1
    again.note("r-2", OLD)
    again.save()
    assert Memory(path).runs() == {"r-1": Seen(5), "r-2": OLD}


def test_the_operator_may_have_a_run_forgotten(tmp_path):
    path = tmp_path / "seen"
    this = Memory(path)
    this.note("r-1", NEW)
    this.note("r-2", OLD)
    this.save()
    assert this.forget("r-1")
    assert not this.forget("r-1")
    assert Memory(path).runs() == {"r-2": OLD}


def test_the_file_is_compacted_while_the_agent_runs(tmp_path):
    path, line = tmp_path / "seen", 186
    this = Memory(path)
    this.note("r-2", OLD)
    for number in range(3 * seen_store.LINES_MIN):
        this.note("r-1", Seen(number, 1 + number, 0, 0, "a" * 64))
        this.save()
        assert path.stat().st_size <= (seen_store.LINES_MIN + 1) * line
    assert Memory(path).runs() == {"r-1": Seen(number, 1 + number, 0, 0, "a" * 64), "r-2": OLD}


def test_a_run_that_is_forgotten_beside_a_running_agent_is_gone_and_others_stay(tmp_path):
    path = tmp_path / "seen"
    this = Memory(path)
    this.note("r-1", OLD)
    this.note("r-2", OLD)
    this.save()
    this.note("r-2", NEW)
    assert this.forget("r-1")
    assert not this.forget("r-1")
    assert Memory(path).runs() == {"r-2": NEW}
    this.note("r-1", NEW)
    this.save()
    assert Memory(path).runs() == {"r-1": NEW, "r-2": NEW}

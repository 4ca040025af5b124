"""The files of a log: they go on after a crash, share an end, and follow one another."""

import os
import shutil
import stat

import pytest

from atoll.protocol.audit_files import APPEND_MAX, AuditFiles, AuditUnusable, log_files, sizes
from atoll.protocol.chain import EVENTS_MAX, Event, instant, read_line
from atoll.server.audit.reading import Source, last_checkpoint, verify

NOW = 1_800_000_000.0


def event(number=0):
    return Event(instant(NOW), "ada", "operator", "run.stop", f"run-{number}", "ok")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state" / "audit"


def opened(folder, **how):
    return AuditFiles(folder, lambda: NOW, **how)


def written(folder, count, *, sign=True, **how):
    files = opened(folder, **how)
    files.append([event(n) for n in range(count)], sign=sign)
    files.close()


def checked(folder):
    return verify(Source.of_state(folder.parent))


def objects(folder):
    lines = [read_line(data) for _, data in Source.of_state(folder.parent).lines()]
    return [(line.event.action, line.event.object) for line in lines if line.event is not None]


def test_events_are_there_for_the_next_process(folder):
    written(folder, 3)
    written(folder, 2)
    found = checked(folder)
    assert (found.events, found.checkpoints, found.unsigned, found.faults) == (5, 2, 0, [])


def test_a_checkpoint_follows_every_256_events_unasked(folder):
    files = opened(folder)
    for _ in range(3):
        files.append([event()] * 200)
    assert (files.unsigned, checked(folder).checkpoints) == (600 - 2 * EVENTS_MAX, 2)
    files.append([event()] * APPEND_MAX)
    assert checked(folder).faults == []


def test_the_newest_checkpoint_is_known(folder):
    files = opened(folder)
    assert files.checkpoint is None
    files.append([event()], sign=True)
    assert files.checkpoint == last_checkpoint(Source.of_state(folder.parent))
    before = files.checkpoint
    files.append([], sign=True)
    assert files.checkpoint == before, "there was nothing to sign"


def test_nobody_else_may_read_the_key(folder):
    written(folder, 1)
    assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_files_follow_one_another_and_carry_the_chain(folder):
    files = opened(folder, file_bytes=2000)
    for _ in range(10):
        files.append([event()] * 3, sign=True)
    files.close()
    assert len(log_files(folder)) > 3
    found = checked(folder)
    assert (found.events, found.faults) == (30, [])
    log_files(folder)[1].unlink()
    assert any("are missing" in str(fault) for fault in checked(folder).faults)


def test_one_file_alone_can_be_verified(folder):
    files = opened(folder, file_bytes=2000)
    for _ in range(10):
        files.append([event()] * 3, sign=True)
    found = verify(Source.of_files(log_files(folder)[2:3]))
    assert found.faults == []
    assert found.first.seq > 0


def test_two_processes_append_in_turns(folder):
    one, other = opened(folder, file_bytes=3000), opened(folder, file_bytes=3000)
    for _ in range(10):
        one.append([event(1)])
        other.append([event(2), event(3)], sign=True)
    found = checked(folder)
    assert (found.events, found.faults) == (30, [])


@pytest.mark.parametrize("lost", [1, 2, 40, 300])
def test_an_unfinished_end_is_cut_off_kept_and_said(folder, lost):
    written(folder, 5)
    written(folder, 4, sign=False)
    path = log_files(folder)[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    left = whole[:-lost].count(b"\n")
    written(folder, 1)
    found = checked(folder)
    assert found.faults == []
    assert objects(folder)[-2:] == [("audit.repair", f"line {left}"), ("run.stop", "run-0")]
    (cut,) = folder.glob("cut-*.bin")
    assert whole[:-lost].endswith(cut.read_bytes())


def test_blocks_that_a_power_failure_has_taken_behind_a_checkpoint_are_cut_off(folder):
    written(folder, 5)
    at = log_files(folder)[0].stat().st_size
    written(folder, APPEND_MAX, sign=False)
    path = log_files(folder)[0]
    data = bytearray(path.read_bytes())
    data[at + 100 : at + 4196] = bytes(4096)  # checkpoints after it were written, and nobody had waited for the disk
    path.write_bytes(data)
    written(folder, 1)
    assert checked(folder).faults == []
    assert [kind for kind, _ in objects(folder)] == ["run.stop"] * 5 + ["audit.repair", "run.stop"]


def test_damage_that_no_crash_can_have_done_stays_to_be_found(folder):
    for _ in range(10):
        written(folder, 5)
    path = log_files(folder)[0]
    path.write_bytes(path.read_bytes().replace(b"run-3", b"run-8", 1))
    written(folder, 1)
    assert len(checked(folder).faults) == 1
    assert not list(folder.glob("cut-*"))


def test_a_file_that_was_begun_and_not_written_is_gone_on_with(folder):
    written(folder, 5)
    next_ = folder / f"audit-{6:012d}.jsonl"
    next_.touch()
    written(folder, 2)
    assert next_.stat().st_size > 0
    found = checked(folder)
    assert (found.events, found.faults) == (7, [])


def test_without_its_key_a_log_is_not_gone_on_with(folder):
    written(folder, 1)
    (folder / "key.pem").unlink()
    with pytest.raises(AuditUnusable, match=r"key\.pem is missing.*put it back from a backup"):
        opened(folder)
    shutil.rmtree(folder)
    written(folder, 1)
    assert checked(folder).faults == []


def test_a_key_of_another_kind_is_refused(folder):
    folder.mkdir(parents=True)
    (folder / "key.pem").write_bytes(b"nonsense")
    with pytest.raises(AuditUnusable, match="no private key in PEM"):
        opened(folder)


def test_a_full_disk_leaves_nothing_that_the_next_append_does_not_mend(folder, monkeypatch):
    files = opened(folder)
    files.append([event(1)], sign=True)
    real = os.pwrite

    def full(file, data, at):
        if len(data) > 100:
            return real(file, data[:100], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no room"):
        files.append([event(2)])
    monkeypatch.undo()
    files.append([event(2)], sign=True)
    found = checked(folder)
    assert found.faults == []
    assert [object_ for kind, object_ in objects(folder) if kind == "run.stop"] == ["run-1", "run-2"]


def test_a_copy_without_a_lock_can_be_read(folder, tmp_path):
    written(folder, 3)
    shutil.copytree(folder.parent, tmp_path / "copy", ignore=shutil.ignore_patterns("lock", "key.pem"))
    assert verify(Source.of_state(tmp_path / "copy")).events == 3
    assert len(sizes(tmp_path / "copy" / "audit")) == 1

"""The files of a log: they go on after a crash, share an end, and follow one another."""

import errno
import fcntl
import os
import shutil
import stat
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.audit.chain import EVENTS_MAX, Event, instant, read_line
from atoll.protocol.audit.files import APPEND_MAX, AuditFiles, AuditUnusable, cut_files, log_files, sizes
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
    (cut,) = cut_files(folder)
    assert whole[:-lost].endswith(cut.read_bytes())


def test_blocks_that_a_power_failure_has_taken_behind_a_checkpoint_are_cut_off(folder):
    written(folder, 5)
    at = log_files(folder)[0].stat().st_size
    written(folder, EVENTS_MAX - 1, sign=False)
    path = log_files(folder)[0]
    data = bytearray(path.read_bytes())
    data[at + 100 : at + 4196] = bytes(4096)
    path.write_bytes(data)
    written(folder, 1)
    assert checked(folder).faults == []
    assert [kind for kind, _ in objects(folder)] == ["run.stop"] * 5 + ["audit.repair", "run.stop"]
    assert [path.read_bytes() for path in cut_files(folder)] == [bytes(data[at:])]


def test_a_checkpoint_is_written_when_all_before_it_is_on_the_disk(folder, monkeypatch):
    files, said = opened(folder), []
    files.append([event()], sign=True)
    real_write, real_sync = os.pwrite, os.fdatasync

    def write(file, data, at):
        said.append(["checkpoint" if b'"signature":"' in line else "event" for line in bytes(data).splitlines()])
        return real_write(file, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fdatasync", lambda file: said.append("sync") or real_sync(file))
    files.append([event()] * 2)
    files.append([], sign=True)
    assert said == [["event"] * 2, "sync", ["checkpoint"], "sync"]
    said.clear()
    files.append([event()] * (EVENTS_MAX + 3), sign=True)
    full, rest = ["event"] * EVENTS_MAX, ["event"] * 3
    assert said == [full, "sync", ["checkpoint", *rest], "sync", ["checkpoint"], "sync"]


def test_as_many_events_as_may_be_unsigned_are_signed_before_one_more_follows(folder):
    written(folder, EVENTS_MAX)
    path = log_files(folder)[0]
    whole = path.read_bytes()
    events, checkpoint = whole[: whole.rindex(b"\n", 0, -1) + 1], whole[whole.rindex(b"\n", 0, -1) + 1 :]
    for left in (b"", checkpoint[:50]):
        path.write_bytes(events + left)
        written(folder, 1)
        found = checked(folder)
        assert (found.faults, found.unsigned) == ([], 0)


BLOCK = 64
"""The size of a block of the disk that loses some; smaller than any real one, so that the log has many [bytes]."""


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6), st.data())
def test_no_power_failure_leaves_a_fault_or_loses_a_signed_record(appends, data):
    with TemporaryDirectory() as state, pytest.MonkeyPatch.context() as patch:
        for module in ("files", "chain"):
            patch.setattr(f"atoll.protocol.audit.{module}.EVENTS_MAX", 3)
        folder = Path(state) / "audit"
        disk = Disk()
        with pytest.MonkeyPatch.context() as watched:
            watched.setattr(os, "pwrite", disk.write)
            watched.setattr(os, "fdatasync", disk.sync)
            files = opened(folder)
            for count, sign in appends:
                files.append([event(n) for n in range(count)], sign=sign)
            files.close()
        if not log_files(folder):
            return
        missing = data.draw(st.integers(0, len(disk.moments)), label="writes that were never begun")
        safe, written_ = disk.at(len(disk.moments) - missing)
        blocks = st.integers(len(safe) // BLOCK, len(written_) // BLOCK)
        lost = data.draw(st.sets(blocks, max_size=4), label="blocks that are lost")
        short = data.draw(st.integers(0, len(written_) - len(safe)), label="bytes that the file is too short")
        log_files(folder)[0].write_bytes(torn(safe, written_, lost)[: len(written_) - short])
        written(folder, 1)
        found = checked(folder)
        assert (found.faults, len(log_files(folder))) == ([], 1)
        assert log_files(folder)[0].read_bytes().startswith(safe)


class Disk:
    """A disk that records what was written, and what of it is durable."""

    def __init__(self):
        self.written, self.num_safe, self.moments = b"", 0, []
        self._write, self._sync = os.pwrite, os.fdatasync

    def write(self, file, data, at):
        assert at == len(self.written)
        self.written += bytes(data)
        self.moments.append((self.num_safe, len(self.written)))
        return self._write(file, data, at)

    def sync(self, file):
        self.num_safe = len(self.written)
        self._sync(file)

    def at(self, moment):
        """Return the durable bytes and the written bytes after the first `moment` writes."""
        num_safe, num_written = (0, 0) if moment == 0 else self.moments[moment - 1]
        return self.written[:num_safe], self.written[:num_written]


def torn(safe, written_, lost):
    """Return the bytes after a power failure: all durable ones, and the rest with the lost blocks zeroed."""
    it = bytearray(written_)
    for block in lost:
        it[block * BLOCK : (block + 1) * BLOCK] = bytes(len(it[block * BLOCK : (block + 1) * BLOCK]))
    return safe + bytes(it[len(safe) :])


# ---------------------------------------------------------------- what no crash does


def removed(number):
    def change(lines):
        del lines[number]

    return change


def changed(number):
    def change(lines):
        lines[number] = lines[number].replace(b"ada", b"eve").replace(b'"signature":"', b'"signature":"ff', 1)

    return change


def garbage(lines):
    lines[:] = [bytes(range(1, 200)) * 3 + b"\n"] * 4


def short_garbage(lines):
    lines[:] = [b"garbage"]


TAMPERED = {
    **{f"line {n} from the end is removed": removed(-n) for n in range(2, 19)},
    **{f"line {n} from the end is changed": changed(-n) for n in range(1, 19)},
    "garbage": garbage,
    "a word of garbage": short_garbage,
}


@pytest.mark.parametrize("how", TAMPERED)
def test_damage_that_no_crash_has_done_is_never_mended_and_always_found(folder, how):
    for _ in range(6):
        written(folder, 2)
    damaged = log_files(folder)[0]
    lines = damaged.read_bytes().splitlines(keepends=True)
    TAMPERED[how](lines)
    damaged.write_bytes(b"".join(lines))
    before = checked(folder).faults
    assert before
    for _ in range(3):
        written(folder, 2)
        found = checked(folder)
        assert set(before) <= set(found.faults)
        assert damaged.read_bytes() == b"".join(lines), "it is evidence"
    assert (len(log_files(folder)), cut_files(folder)) == (2, [])
    assert [line.event.object for line in found.mended] == [damaged.name], "it is said once"
    assert found.mended[0].event.digests == {"file": sha256(damaged.read_bytes()).hexdigest()}
    assert not any(fault.where.startswith(log_files(folder)[1].name + ":2") for fault in found.faults)


def test_a_file_that_is_put_back_makes_the_log_whole_again(folder):
    for _ in range(3):
        written(folder, 2)
    path = log_files(folder)[0]
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"run-1", b"run-8", 1))
    written(folder, 1)
    assert checked(folder).faults != []
    path.write_bytes(whole)
    assert checked(folder).faults == []


def test_an_older_file_in_the_place_of_the_last_one_is_found_and_not_written_over(folder):
    files = opened(folder, file_bytes=2000)
    for _ in range(4):
        files.append([event()] * 3, sign=True)
    files.close()
    first, *_, last = log_files(folder)
    shutil.copy(first, last)
    written(folder, 1)
    assert last.read_bytes() == first.read_bytes()
    assert log_files(folder)[-1] > last
    assert checked(folder).faults != []


def test_a_writer_that_is_still_there_goes_on_in_the_file_that_another_has_begun(folder):
    files = opened(folder)
    files.append([event()] * 3, sign=True)
    path = log_files(folder)[0]
    path.write_bytes(bytes(range(1, 256)) + path.read_bytes()[255:])
    written(folder, 1)
    files.append([event()], sign=True)
    assert [kind for kind, _ in events_in(log_files(folder)[1])] == ["audit.fault", "run.stop", "run.stop"]


def events_in(path):
    lines = map(read_line, path.read_bytes().splitlines(keepends=True))
    return [(line.event.action, line.event.object) for line in lines if line.event is not None]


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


def test_on_a_full_disk_nothing_is_written_that_the_next_try_would_write_twice(folder, monkeypatch):
    files = opened(folder)
    files.append([event(1)], sign=True)
    whole, real = log_files(folder)[0].read_bytes(), os.pwrite

    def full(file, data, at):
        if len(data) > 100:
            return real(file, data[:100], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no room"):
        files.append([event(2)])
    monkeypatch.undo()
    assert log_files(folder)[0].read_bytes() == whole
    files.append([event(2)], sign=True)
    found = checked(folder)
    assert found.faults == []
    assert [object_ for kind, object_ in objects(folder) if kind == "run.stop"] == ["run-1", "run-2"]


def test_a_copy_without_a_lock_can_be_read(folder, tmp_path):
    written(folder, 3)
    shutil.copytree(folder.parent, tmp_path / "copy", ignore=shutil.ignore_patterns("lock", "key.pem"))
    assert verify(Source.of_state(tmp_path / "copy")).events == 3
    assert len(sizes(tmp_path / "copy" / "audit")) == 1


def test_a_lock_that_fails_is_no_reason_to_read_beside_a_writer(folder, monkeypatch):
    written(folder, 1)

    def full(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", full)
    with pytest.raises(OSError, match="No locks available"):
        sizes(folder)

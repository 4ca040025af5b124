"""The archive of a log: its lines go elsewhere, and the proof stays."""

import json
import os
import shutil
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.protocol.audit import files as files_of_log
from atoll.protocol.audit.archive import ArchiveRefused
from atoll.protocol.audit.chain import EVENTS_MAX, Event, instant
from atoll.protocol.audit.files import PUBLIC_KEY, AuditFiles, audit_folder, log_files
from atoll.server.audit.reading import Source, last_checkpoint, verify

NOW = 1_800_000_000.0


@pytest.fixture
def state(tmp_path):
    write(tmp_path / "state", 5)
    return tmp_path / "state"


def opened(state, **how):
    return AuditFiles(audit_folder(state), lambda: NOW, **how)


def write(state, count, *, sign=True, **how):
    files = opened(state, **how)
    files.append(
        [Event(instant(NOW), "ada", "operator", "run.stop", f"run-{n}", "ok") for n in range(count)], sign=sign
    )
    files.close()


def archive(state, out, **how):
    files = opened(state, **how)
    try:
        return files.archive(out, actor="ada", role="local")
    finally:
        files.close()


def faults(state, *archives, expected=()):
    source = Source.of_state(state)
    found = verify(source.behind(archives) if archives else source, expected)
    return [str(fault) for fault in found.faults], found


def test_the_log_continues_behind_its_archive_and_is_verified_across(state, tmp_path):
    write(state, 3, sign=False)
    done = archive(state, tmp_path / "old")
    assert (done.first, done.last) == (0, 9)
    assert len(log_files(audit_folder(state))) == 1
    write(state, 2)
    alone, found = faults(state)
    assert alone == []
    assert (found.first.seq, found.events) == (10, 3)
    assert found.archived is not None
    last = (tmp_path / "old/audit-000000000000.jsonl").read_text().splitlines()[-1]
    assert "signature" in json.loads(last)
    across, found = faults(state, tmp_path / "old")
    assert across == []
    assert (found.first.seq, found.events, found.archived) == (0, 11, None)
    assert verify(Source.of_files(log_files(tmp_path / "old")).with_key(tmp_path / "old" / PUBLIC_KEY)).faults == []


def test_one_archive_takes_the_lines_of_years(state, tmp_path):
    for year in range(3):
        assert archive(state, tmp_path / "old").files
        assert archive(state, tmp_path / "old").files == (), "there is nothing new"
        write(state, 4 + year, file_bytes=500)
    across, found = faults(state, tmp_path / "old")
    assert across == []
    assert found.first.seq == 0


def test_a_writer_that_is_still_there_continues_behind_the_archive(state, tmp_path):
    running = opened(state)
    running.append([Event(instant(NOW), "ada", "operator", "run.stop", "before", "ok")])
    archive(state, tmp_path / "old")
    running.append([Event(instant(NOW), "ada", "operator", "run.stop", "after", "ok")], sign=True)
    running.close()
    assert faults(state)[0] == []
    assert faults(state, tmp_path / "old")[0] == []
    assert "after" in log_files(audit_folder(state))[0].read_text()


def test_a_checkpoint_of_an_archived_line_is_found_in_the_archive_alone(state, tmp_path):
    known = last_checkpoint(Source.of_state(state))
    archive(state, tmp_path / "old")
    assert faults(state, expected=[known])[0] == [
        f"the archive: checkpoint {known} is on an archived line: name its --archive"
    ]
    assert faults(state, tmp_path / "old", expected=[known])[0] == []


@pytest.mark.parametrize("way", ["event alone", "event and other events", "other hash", "lines cut"])
def test_without_the_key_nobody_claims_an_archive(state, tmp_path, way):
    """A stranger removes the lines and writes the event himself; the writer goes on behind it."""
    archive(state, tmp_path / "old")
    [path] = log_files(audit_folder(state))
    event, checkpoint = path.read_text().splitlines(keepends=True)
    match way:
        case "event alone":
            path.write_text(event)
        case "event and other events":
            path.write_text(event)
            write(state, 3)
        case "other hash":
            changed = json.loads(event) | {"digests": {"archived": "1" * 64}}
            path.write_text(json.dumps(changed, sort_keys=True, separators=(",", ":")) + "\n" + checkpoint)
        case "lines cut":
            path.write_text(checkpoint)
            path.rename(path.with_name(f"audit-{11:012d}.jsonl"))
    assert faults(state)[0] != []


def test_a_changed_archive_is_found(state, tmp_path):
    archive(state, tmp_path / "old")
    [copy] = log_files(tmp_path / "old")
    copy.write_text(copy.read_text().replace("ada", "bob", 1))
    assert faults(state, tmp_path / "old")[0][0].startswith("audit-000000000000.jsonl:1: changed")
    copy.write_text(copy.read_text().rpartition('{"key"')[0])
    assert faults(state, tmp_path / "old")[0]


def test_the_archive_of_another_log_and_the_folder_of_the_log_are_refused(state, tmp_path):
    write(tmp_path / "other", 2)
    archive(tmp_path / "other", tmp_path / "old")
    before = {path.name: path.read_bytes() for path in audit_folder(state).iterdir()}
    for out, why in ((tmp_path / "old", "another log"), (audit_folder(state) / "old", "the log's state directory")):
        with pytest.raises(ArchiveRefused, match=why):
            archive(state, out)
    assert {path.name: path.read_bytes() for path in audit_folder(state).iterdir()} == before


class Died(BaseException):
    pass


@pytest.mark.parametrize("how", ["changed", "removed"])
def test_the_faults_of_archived_lines_are_told_and_stay_in_the_log(state, tmp_path, how):
    """The log was "sound from line 7 on" after the archive, and nobody had been told."""
    path = log_files(audit_folder(state))[0]
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2:3] = [] if how == "removed" else [lines[2].replace(b"ada", b"bob")]
    write(state, 2, file_bytes=1)  # the damaged file is an older one: no start reads it
    path.write_bytes(b"".join(lines))
    done = archive(state, tmp_path / "old")
    assert [fault.where for fault in done.found.faults] == ["audit-000000000000.jsonl:3"]
    alone, found = faults(state)
    assert (alone, found.archived.event.outcome) == ([], "with 1 fault")
    across, _ = faults(state, tmp_path / "old")
    assert across == [str(fault) for fault in done.found.faults]
    write(state, 1)
    assert archive(state, tmp_path / "old").found.num_faults == 0, "of these lines alone"


def test_an_archive_in_the_state_directory_is_refused(state, tmp_path):
    for out in (state, state / "runs" / "r-1", state / "archive"):
        with pytest.raises(ArchiveRefused, match=r"lies in the log's state directory .*: name another folder"):
            archive(state, out)
    assert not (state / "archive").exists()
    assert archive(state, tmp_path / "state-archive").files


@given(step=st.integers(0, 12), more=st.integers(0, 3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_crash_at_any_step_loses_no_line_and_the_next_archive_completes_it(tmp_path_factory, step, more):
    folder = tmp_path_factory.mktemp("crash")
    state, out = folder / "state", folder / "old"
    write(state, EVENTS_MAX + 2, file_bytes=20_000)
    with pytest.MonkeyPatch.context() as patch:
        left = iter(range(step))

        def dying(function):
            def step(*args, **how):
                if next(left, None) is None:
                    raise Died
                return function(*args, **how)

            return step

        for module, name in ((os, "replace"), (os, "pwrite"), (os, "fdatasync"), (files_of_log.Path, "unlink")):
            patch.setattr(module, name, dying(getattr(module, name)))
        patch.setattr(files_of_log, "sync_folder", dying(files_of_log.sync_folder))
        with suppress(Died):
            archive(state, out)
    write(state, more, sign=bool(more))
    archives = [out] if out.is_dir() and log_files(out) else []
    across, found = faults(state, *archives)
    assert across == []
    assert found.first.seq == 0
    archive(state, out)
    assert faults(state)[0] == []
    assert faults(state, out)[0] == []
    texts = [path.read_text() for path in (*log_files(out), *log_files(audit_folder(state)))]
    assert all(sum(f'"run-{n}"' in text for text in texts) >= 1 for n in range(EVENTS_MAX + 2))
    shutil.rmtree(folder)

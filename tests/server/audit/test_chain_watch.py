"""The verification of a log that is being written: changes are found, and nothing else is."""

import pytest

from atoll.protocol.audit.files import audit_folder, log_files
from atoll.server.audit import chain_watch
from atoll.server.audit.chain_watch import ChainWatch
from tests.server.audit.test_archive import archive, write


@pytest.fixture
def watch(tmp_path, monkeypatch):
    monkeypatch.setattr(chain_watch, "LINES", 3)
    write(tmp_path, 20)
    return ChainWatch(tmp_path)


def passes(watch, steps=30):
    for _ in range(steps):
        watch._next = 0.0  # no rest, however long the pass took
        watch.step()
    return watch.fault


def test_a_log_that_grows_meanwhile_is_whole(tmp_path, watch):
    for count in range(1, 20):
        passes(watch, 1)
        write(tmp_path, count % 3 + 1, sign=count % 2 == 0, file_bytes=4000)
    assert len(log_files(audit_folder(tmp_path))) > 1
    assert passes(watch, 100) == ""


@pytest.mark.parametrize("old", [b"run-3", b'"outcome":"ok"'])
def test_a_line_that_is_changed_under_the_writer_is_found_and_named(tmp_path, watch, caplog, old):
    assert passes(watch) == ""
    [path] = log_files(audit_folder(tmp_path))
    path.write_bytes(path.read_bytes().replace(old, bytes(reversed(old)), 1))
    fault = passes(watch)
    assert fault.startswith(f"the audit log in {audit_folder(tmp_path)} is broken: {path.name}:")
    assert f"`atoll audit verify --state {tmp_path}`" in fault
    assert passes(watch) == fault
    assert caplog.messages == [fault]


def test_a_line_that_is_removed_is_found(tmp_path, watch):
    [path] = log_files(audit_folder(tmp_path))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))
    assert "line 4 is missing" in passes(watch)


def test_an_archive_in_the_middle_of_a_pass_is_no_fault(tmp_path, watch):
    for number in range(6):
        passes(watch, 2)
        write(tmp_path, 7)
        archive(tmp_path, tmp_path.parent / f"{tmp_path.name}-old")
        assert passes(watch, number) == ""
    assert passes(watch) == ""


def test_a_missing_log_is_no_fault_of_the_chain(tmp_path):
    assert passes(ChainWatch(tmp_path)) == ""

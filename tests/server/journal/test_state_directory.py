import json
import os
import signal
import sqlite3
import subprocess
import sys
import zlib

import pytest
from sqlalchemy import inspect

from atoll.server.errors import StateInUse, StateUnusable, StoreCorrupted
from atoll.server.journal import migrations, schema, state_directory
from atoll.server.journal.codec import encode_ledger
from atoll.server.journal.holder import is_held, running_coordinator
from atoll.server.journal.journal import Journal
from atoll.server.journal.schema import SCHEMA_VERSION, StateTooNew
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.members.member import Profile
from atoll.server.rounds.ledger import Ledger

HOLDER = """
import sys, time
from pathlib import Path
from atoll.server.journal.state_directory import StateDirectory
state = StateDirectory.open(Path(sys.argv[1]))
state.announce("127.0.0.1:7070", "127.0.0.1:2", __import__("os").getpid())
print("open", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds `tmp_path / "state"`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "state"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def made(path):
    StateDirectory.open(path).close()
    return path


def set_version(path, value):
    with sqlite3.connect(path / "state.db") as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (value,))
    connection.close()


def test_a_new_directory_has_its_tree_and_its_schema(tmp_path):
    with StateDirectory.open(tmp_path / "deep" / "state") as state:
        assert {"state.db", "lock", "runs"} <= {path.name for path in state.path.iterdir()}
        with state.database.transaction() as connection:
            assert set(inspect(connection).get_table_names()) == set(schema.metadata.tables)
            pragmas = {
                name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "wal_autocheckpoint", "journal_size_limit")
            }
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 2,
        "wal_autocheckpoint": 1000,
        "journal_size_limit": 8 << 20,
    }


def test_nobody_else_may_enter_a_new_directory_and_one_that_is_there_keeps_its_mode(tmp_path):
    before = os.umask(0o022)
    try:
        assert made(tmp_path / "deep" / "state").stat().st_mode & 0o777 == 0o700
        os.close(state_directory.lock_directory(tmp_path / "rank"))
        assert (tmp_path / "rank").stat().st_mode & 0o777 == 0o700
        (tmp_path / "shared").mkdir()
        assert made(tmp_path / "shared").stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(before)


def test_a_directory_is_opened_again_after_it_was_closed(tmp_path):
    made(tmp_path / "state")
    with StateDirectory.open(tmp_path / "state", create=False) as state:
        assert state.path == tmp_path / "state"


def test_the_pragmas_hold_on_a_connection_that_is_made_anew(tmp_path):
    with StateDirectory.open(made(tmp_path / "state")) as state:
        state.database.close()
        with state.database.transaction() as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2


@pytest.mark.real
def test_a_second_coordinator_is_told_who_has_the_directory(tmp_path, holder):
    with pytest.raises(StateInUse, match=rf"{tmp_path}/state is in use by another process \({holder.pid}\)"):
        StateDirectory.open(tmp_path / "state")
    found = running_coordinator(tmp_path / "state")
    assert found is not None
    assert (found.address, found.pid) == ("127.0.0.1:7070", holder.pid)


def test_two_of_one_process_do_not_share_a_directory_either(tmp_path):
    with StateDirectory.open(tmp_path / "state"), pytest.raises(StateInUse, match=str(os.getpid())):
        StateDirectory.open(tmp_path / "state")
    made(tmp_path / "state")


@pytest.mark.real
def test_the_lock_ends_with_its_process(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert running_coordinator(tmp_path / "state") is None
    with StateDirectory.open(tmp_path / "state"):
        assert running_coordinator(tmp_path / "state") is None  # it does not listen yet


@pytest.mark.real
def test_a_process_that_got_the_dead_ones_id_is_not_taken_for_it(tmp_path, holder):
    (tmp_path / "state" / "lock").write_text(f"{holder.pid} 1")
    assert running_coordinator(tmp_path / "state") is None


def test_nobody_runs_where_there_is_nothing(tmp_path):
    assert running_coordinator(tmp_path) is None
    (tmp_path / "file").write_text("x")
    assert running_coordinator(tmp_path / "file") is None


def test_a_closed_directory_no_longer_names_an_address(tmp_path):
    with StateDirectory.open(tmp_path / "state") as state:
        state.announce("127.0.0.1:1", "127.0.0.1:2", os.getpid())
        assert is_held(state.path)
        found = running_coordinator(state.path)
        assert (found.address, found.admin_address) == ("127.0.0.1:1", "127.0.0.1:2")
        assert json.loads((state.path / "coordinator.json").read_text()) == {
            "address": "127.0.0.1:1",
            "admin_address": "127.0.0.1:2",
            "pid": os.getpid(),
            "insecure": False,
        }
    assert running_coordinator(tmp_path / "state") is None
    assert not (tmp_path / "state" / "coordinator.json").exists()
    assert not is_held(tmp_path / "nowhere")


def test_the_last_sign_of_life_outlives_the_process(tmp_path):
    with StateDirectory.open(tmp_path / "state") as state:
        assert state.last_alive() is None
        state.mark_alive(1762000000.123456)
        state.mark_alive(1762000001.5)
        assert state.last_alive() == 1762000001.5
    with StateDirectory.open(tmp_path / "state") as state:
        assert state.last_alive() == 1762000001.5
        (state.path / "alive").write_bytes(b"")
        assert state.last_alive() is None
        state.mark_alive(2.0)
        assert state.last_alive() == 2.0


def test_a_newer_schema_is_refused_with_both_versions_and_what_to_do(tmp_path):
    set_version(made(tmp_path / "state"), str(SCHEMA_VERSION + 7))
    with pytest.raises(StateTooNew, match="schema version 11, this Atoll knows up to 4: use the Atoll that wrote it"):
        StateDirectory.open(tmp_path / "state")
    set_version(tmp_path / "state", str(SCHEMA_VERSION))
    made(tmp_path / "state")  # the lock was let go


def test_an_older_schema_is_migrated_step_by_step(tmp_path, monkeypatch):
    path = made(tmp_path / "state")
    monkeypatch.setattr(schema, "SCHEMA_VERSION", SCHEMA_VERSION + 2)
    steps = {
        SCHEMA_VERSION: lambda c: c.exec_driver_sql("CREATE TABLE one (a)"),
        SCHEMA_VERSION + 1: lambda c: c.exec_driver_sql("CREATE TABLE two (a)"),
    }
    monkeypatch.setattr(migrations, "MIGRATIONS", steps)
    for _ in range(2):
        with StateDirectory.open(path) as state, state.database.transaction() as connection:
            assert {"one", "two"} <= set(inspect(connection).get_table_names())
            assert schema.check_version(connection, path) == SCHEMA_VERSION + 2


def to_second_schema(path):
    with sqlite3.connect(path / "state.db") as connection:
        for table in ("members", "summaries", "participations"):
            connection.execute(f"DROP TABLE {table}")
        for column in ("first", "num_members"):
            connection.execute(f"ALTER TABLE snapshots DROP COLUMN {column}")
    set_version(path, "2")


def test_a_directory_of_the_second_schema_keeps_its_snapshots(tmp_path):
    path = made(tmp_path / "state")
    to_second_schema(path)
    ledger = Ledger(now=5.0)
    ledger.membership.joined("a", "s", Profile(3, "x"))
    body = encode_ledger(ledger)
    checksum = zlib.crc32(f"7\0005.0\0{body}".encode())
    with sqlite3.connect(path / "state.db") as connection:
        connection.execute("INSERT INTO snapshots VALUES ('r', 7, 5.0, ?, ?)", (body, checksum))
    with StateDirectory.open(path) as state:
        recovered = Journal(state).load("r")
    assert (recovered.snapshot_seq, recovered.ledger, recovered.faults) == (7, ledger, ())
    assert recovered.ledger.membership.unwritten.changed == {"a"}, "the next snapshot puts it on a page"


def test_a_directory_of_the_first_schema_gets_its_table_of_updates(tmp_path):
    path = made(tmp_path / "state")
    to_second_schema(path)
    with sqlite3.connect(path / "state.db") as connection:
        connection.execute("DROP TABLE updates")
    set_version(path, "1")
    with StateDirectory.open(path) as state, state.database.transaction() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM updates").scalar() == 0
        assert schema.check_version(connection, path) == SCHEMA_VERSION


def test_a_migration_that_fails_changes_nothing(tmp_path, monkeypatch):
    path = made(tmp_path / "state")

    def fail(connection):
        connection.exec_driver_sql("CREATE TABLE one (a)")
        raise RuntimeError("no")

    monkeypatch.setattr(schema, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    monkeypatch.setattr(migrations, "MIGRATIONS", {SCHEMA_VERSION: fail})
    with pytest.raises(RuntimeError):
        StateDirectory.open(path)
    monkeypatch.undo()
    with StateDirectory.open(path) as state, state.database.transaction() as connection:
        assert "one" not in inspect(connection).get_table_names()


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "state").write_text("x")
    for path in (tmp_path / "state", tmp_path / "state" / "below"):
        with pytest.raises(StateUnusable, match="is not a directory"):
            StateDirectory.open(path)


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a place where nobody may write")
def test_a_path_that_cannot_be_written_is_refused():
    with pytest.raises(StateUnusable, match="cannot be written"):
        StateDirectory.open(state_directory.Path("/proc/atoll"))


def test_what_is_not_there_is_made_only_on_demand(tmp_path):
    with pytest.raises(StateUnusable, match=r"there is no state\.db in it"):
        StateDirectory.open(tmp_path / "state", create=False)
    assert not (tmp_path / "state").exists()


def overwrite(path, start, length):
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xa5" * length)


@pytest.mark.parametrize(("start", "length"), [(0, 512), (4096, 4096), (100, 3900)])
def test_a_damaged_database_is_refused_with_what_to_do(tmp_path, start, length):
    path = made(tmp_path / "state")
    (path / "runs" / "r" / "versions").mkdir(parents=True)
    (path / "runs" / "r" / "versions" / "000003.safetensors").write_bytes(b"")
    overwrite(path / "state.db", start, length)
    with pytest.raises(
        StoreCorrupted, match=r"state.db: damaged.*from a backup.*Model versions in .* \(1\) are separate safetensors"
    ) as caught:
        StateDirectory.open(path)
    assert "can still be read" in str(caught.value)


def test_a_database_that_vanished_from_under_its_runs_is_not_made_anew(tmp_path):
    path = made(tmp_path / "state")
    (path / "runs" / "r").mkdir()
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (path / name).unlink(missing_ok=True)
    for _ in range(2):  # also when the first attempt left an empty file
        with pytest.raises(StoreCorrupted, match="missing or empty, but"):
            StateDirectory.open(path)


def test_somebody_elses_database_is_refused(tmp_path):
    (tmp_path / "state").mkdir()
    with sqlite3.connect(tmp_path / "state" / "state.db") as connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    with pytest.raises(StoreCorrupted, match="no database of Atoll"):
        StateDirectory.open(tmp_path / "state")


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", ".hidden", "-x", "a\0", "a" * 129, "é"])
def test_a_run_id_is_never_a_path_of_another_kind(tmp_path, run_id):
    with StateDirectory.open(tmp_path / "state") as state:
        assert state.run("digits-1") == state.path / "runs" / "digits-1"
        with pytest.raises(ValueError, match="run id"):
            state.run(run_id)

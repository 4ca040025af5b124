"""Errors that pass by themselves: exit code 75, and one sentence with the folder, the room needed and the room free."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from atoll.ground.durable import DiskFull
from atoll.operations.faults import TEMPORARY, CommandError, code_of, temporary_cause
from atoll.operations.temporary import TryAgain, existing_parent, writing_to
from atoll.protocol.settings import ConfigError
from atoll.protocol.signals import ExitCode
from atoll.server.errors import DatabaseAway, StateUnusable
from atoll.server.identity.authority import AuthorityAway

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NEVER = (errno.EROFS, errno.EACCES, errno.ENOENT, errno.EXDEV, errno.EEXIST)


def of_sqlite(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("of SQLite")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize("number", sorted(TEMPORARY), ids=errno.errorcode.get)
def test_a_disk_that_may_come_back_gives_75_however_deep_its_error_is(number: int) -> None:
    fault = OSError(number, os.strerror(number), "/data")
    wrapped = ConfigError(["state: cannot be used"])
    wrapped.__cause__ = fault
    outer = CommandError("no start")
    outer.__cause__ = wrapped
    assert [code_of(error) for error in (fault, wrapped, outer)] == [ExitCode.AWAY] * 3


@pytest.mark.parametrize("number", NEVER, ids=errno.errorcode.get)
def test_what_waits_for_a_person_gives_2(number: int) -> None:
    """A file system that is mounted read-only stays so until a person remounts it."""
    assert code_of(OSError(number, os.strerror(number), "/data")) == ExitCode.OPERATOR


@pytest.mark.parametrize(
    "error", [DatabaseAway("x"), AuthorityAway("x"), DiskFull("x")], ids=lambda it: type(it).__name__
)
def test_a_server_or_a_disk_that_is_away_gives_75(error: OSError) -> None:
    assert code_of(error) == ExitCode.AWAY
    assert code_of(StateUnusable("x")) == ExitCode.OPERATOR


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE])
def test_sqlite_on_a_full_or_failing_disk_gives_75(code: int) -> None:
    error = StateUnusable("state.db")
    error.__cause__ = of_sqlite(code)
    assert temporary_cause(error) is error.__cause__
    error.__cause__ = of_sqlite(sqlite3.SQLITE_CORRUPT)
    assert temporary_cause(error) is None


@pytest.mark.parametrize("number", NO_ROOM, ids=errno.errorcode.get)
def test_the_sentence_of_a_full_disk_names_the_folder_and_both_numbers(number: int, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "made"
    with pytest.raises(TryAgain) as refused, writing_to("state", folder, needed=2_000_000):
        raise OSError(number, os.strerror(number))
    (fault,) = refused.value.faults
    assert fault.startswith(f"state: {folder} has no room: 2.0 MB are needed at least, and ")
    assert " free. Free some space; a service manager starts it again by itself (exit code 75)" in fault
    assert ("the quota is used up" in fault) is (number == errno.EDQUOT)


def test_the_sentence_of_a_mount_that_is_away_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(TryAgain, match=r"cannot be used now: Stale file handle\. Check the disk or the mount; a"),
        writing_to("state", tmp_path),
    ):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), tmp_path / "lock")


@pytest.mark.parametrize("error", [ConfigError(["a typo"]), OSError(errno.EROFS, "read-only"), KeyError("a bug")])
def test_other_errors_stay_as_they_are(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised, writing_to("state", tmp_path):
        raise error
    assert raised.value is error


def test_the_nearest_folder_that_exists_is_found(tmp_path: Path) -> None:
    assert existing_parent(tmp_path / "a" / "b") == tmp_path
    assert existing_parent(tmp_path) == tmp_path

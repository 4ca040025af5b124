"""What a command waits for: it is said after a moment, and what cannot be had is refused in the end."""

import fcntl
import io
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.cli import waiting
from atoll.cli.printing import note
from atoll.client.policy.history import PolicyHistory
from atoll.operations import admin
from atoll.operations.reporter import Reporter, reporting_to, waiting_for
from atoll.protocol.audit.files import audit_folder
from atoll.protocol.identity import dialer
from atoll.protocol.identity.enrolling import Place
from atoll.protocol.identity.join_code import JoinCode
from atoll.protocol.wire.channel import client_options
from atoll.server.journal.holder import running_coordinator
from atoll.server.journal.state_directory import StateDirectory
from tests.cli.federation import ATOLL, Federation, wait_for
from tests.cli.invoking import TINY, invoke
from tests.waiting import BOUND_S

ASKING = {
    "run start": [f"{TINY}:task"],
    "run stop": ["digits-1"],
    "run pause": ["digits-1"],
    "run resume": ["digits-1"],
    "client invite": ["north"],
    "client revoke": ["north"],
    "client members": [],
    "rank list": [],
}
"""The commands that ask the coordinator which holds the state directory."""

ASKING_FROM_ELSEWHERE = {
    **ASKING,
    "run delete": ["digits-1"],
    "run list": [],
    "run show": ["digits-1"],
    "round list": [],
    "round show": [],
    "client list": [],
    "model list": [],
    "model export": ["--out", "model.safetensors"],
    "audit show": [],
    "audit verify": [],
    "audit export": [],
}
"""The commands that ask a joined coordinator on another machine."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait is said after no time at all; a connection must come within half a second."""
    monkeypatch.setattr(waiting, "SAY_S", 0.0)
    monkeypatch.setattr(admin, "CONNECT_S", 0.5)
    quick = ("grpc.min_reconnect_backoff_ms", 200)
    monkeypatch.setattr(dialer, "client_options", lambda over=(): client_options([*over, quick]))


@contextmanager
def black_hole() -> Iterator[str]:
    """Yield the address of a port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("command", ASKING)
def test_a_coordinator_that_never_answers_is_named_and_refused_in_the_end(command: str, tmp_path: Path) -> None:
    with StateDirectory.open(tmp_path / "state") as state, black_hole() as address:
        state.announce(address, address, os.getpid(), insecure=True)
        result = invoke(*command.split(), *ASKING[command], "--state", tmp_path / "state")
    assert result.exit_code == 2, result.output
    note, fault = result.stderr.splitlines()
    assert note.startswith(f"waiting for the coordinator at {address} (up to 0.5 s for a connection")
    assert fault.startswith(f"atoll: the coordinator at {address} does not answer")


@pytest.mark.parametrize("command", ASKING_FROM_ELSEWHERE)
def test_a_joined_coordinator_that_never_answers_is_named_with_the_file_of_its_address(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "olga"
    invoke("authority", "init", tmp_path / "authority")
    invoke("authority", "issue", tmp_path / "authority", "olga", "--role", "operator", "--out", folder)
    monkeypatch.setenv("ATOLL_IDENTITY", str(folder))
    monkeypatch.chdir(tmp_path)
    with hanging_up() as address:
        Place(address, address, "").store(folder)
        result = invoke(*command.split(), *ASKING_FROM_ELSEWHERE[command])
    assert result.exit_code == 2, result.output
    note, *faults = result.stderr.splitlines()
    assert note.startswith(f"waiting for the coordinator at {address} (")
    assert f"the coordinator at {address} does not answer" in faults[0]
    assert f"set admin_address in {folder / 'place.json'}" in faults[1]


def ends_when_it_is_told(monkeypatch: pytest.MonkeyPatch, end: Callable[[], object]) -> None:
    """Let a command's wait end as soon as the command has told of it, however long its start takes."""
    left = [end]

    def tell(text: str) -> None:
        note(text)
        if left:
            left.pop()()

    monkeypatch.setattr(waiting, "note", tell)


@contextmanager
def hanging_up() -> Iterator[str]:
    """Yield the address of a port that takes connections and closes them after a moment."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:

        def serve() -> None:
            while True:
                try:
                    taken, _ = listening.accept()
                except OSError:
                    return
                time.sleep(0.1)
                taken.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("command", sorted(ASKING.keys() - {"client members"}))  # that one shows what the database has
def test_a_coordinator_that_is_starting_is_waited_for(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command waits while a process holds the directory; it goes on when the process listens, and when it ends."""
    monkeypatch.setattr(admin, "STARTING_S", 0.2)
    state = StateDirectory.open(tmp_path / "state")
    ends_when_it_is_told(monkeypatch, state.close)
    result = invoke(*command.split(), *ASKING[command], "--state", tmp_path / "state")
    assert result.exit_code == 2, result.output
    told, fault = result.stderr.splitlines()
    assert told == f"waiting for the coordinator that holds {tmp_path / 'state'} to listen (it recovers its runs first)"
    assert fault.startswith(f"atoll: no coordinator holds {tmp_path / 'state'}")


class _Failing:
    """A dialer whose first calls fail with these errors; then the coordinator answers."""

    def __init__(self, *errors: grpc.RpcError) -> None:
        self.errors, self.calls = list(errors), 0

    credential = None

    def blocking_channel(self, *_: object) -> Any:
        return closing(self)

    def close(self) -> None:
        pass

    def answer(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answered"


class _Error(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = lambda: code, lambda: details


NO_CONNECTION = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7: "
LATE = _Error(grpc.StatusCode.UNAVAILABLE, NO_CONNECTION + "connection attempt timed out before receiving SETTINGS")
REFUSED = _Error(grpc.StatusCode.UNAVAILABLE, NO_CONNECTION + "Failed to connect to remote host: Connection refused")
CUT = _Error(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def asked(failing: _Failing, monkeypatch: pytest.MonkeyPatch, is_alive: Callable[[], bool] = lambda: True) -> Any:
    monkeypatch.setattr(admin.rpc, "Stub", lambda channel, service: channel)
    monkeypatch.setattr(admin, "CONNECT_S", BOUND_S)
    return admin._ask(failing, "127.0.0.1:7", lambda admin: failing.answer(), is_alive=is_alive)  # type: ignore[arg-type]


def test_a_connection_that_comes_late_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    late = _Failing(LATE, LATE)
    assert (asked(late, monkeypatch), late.calls) == ("answered", 3)


@pytest.mark.parametrize("error", [REFUSED, CUT])
def test_a_refused_connection_and_a_call_that_may_have_arrived_are_final(
    error: grpc.RpcError, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = _Failing(error)
    with pytest.raises(admin.NoAnswer, match=r"does not answer: "):
        asked(failing, monkeypatch)
    assert failing.calls == 1


def test_a_coordinator_that_has_ended_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = _Failing(LATE)
    with pytest.raises(admin.NoAnswer):
        asked(failing, monkeypatch, is_alive=lambda: False)
    assert failing.calls == 1


def test_a_stopped_coordinator_that_goes_on_answers_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "CONNECT_S", BOUND_S)
    it = Federation(tmp_path)
    try:
        it.start("coordinator", "coordinator", "--state", it.state, "--set=coordinator.listen=127.0.0.1:0")
        running = wait_for(lambda: running_coordinator(it.state))
        os.kill(running.pid, signal.SIGSTOP)
        ends_when_it_is_told(monkeypatch, lambda: os.kill(running.pid, signal.SIGCONT))
        result = invoke("client", "invite", "north", "--state", it.state)
    finally:
        for process in it.processes.values():
            process.kill()
            process.wait()
    assert (result.exit_code, result.stdout[:6]) == (0, "atoll-"), result.output
    assert f"waiting for the coordinator at {running.admin_address} (" in result.stderr


def test_the_lock_of_the_audit_log_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    StateDirectory.open(state).close()
    assert invoke("backup", state, tmp_path / "first").exit_code == 0
    lock = os.open(audit_folder(state) / "lock", os.O_RDWR)
    for command in (["backup", state, tmp_path / "second"], ["audit", "show", "--state", state]):
        fcntl.flock(lock, fcntl.LOCK_EX)
        ends_when_it_is_told(monkeypatch, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        result = invoke(*command)
        assert result.exit_code == 0, result.output
        assert f"waiting for the lock of the audit log {audit_folder(state)} (until its holder" in result.stderr
    os.close(lock)


def test_the_lock_of_a_site_s_record_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PolicyHistory(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "policy.db", isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        ends_when_it_is_told(monkeypatch, lambda: other.execute("ROLLBACK"))
        result = invoke("site", "list", "--state", tmp_path)
    assert result.exit_code == 0, result.output
    assert f"waiting for the lock of {tmp_path / 'policy.db'} (up to 5 s" in result.stderr


def test_a_join_code_on_standard_input_is_waited_for() -> None:
    reading, writing = os.pipe()
    with subprocess.Popen([ATOLL, "join", "-"], stdin=reading, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == (
            "waiting for the join code on standard input (until its end, Ctrl-D on a terminal)\n"
        )
        os.close(writing)
        assert process.wait(BOUND_S) == 2
    os.close(reading)


@pytest.mark.parametrize("command", ["join", "agent", "aggregator", "authority serve"])
def test_a_process_says_at_once_which_coordinator_it_dials(command: str, tmp_path: Path) -> None:
    invoke("authority", "init", tmp_path / "authority")
    with black_hole() as address:
        code = JoinCode((address,), bytes(32), bytes(8), bytes(16))
        arguments: dict[str, list[object]] = {
            "join": [code, "--identity", tmp_path / "identity"],
            "agent": [f"{TINY}:task", "--site", "a", "--join", code, "--state", tmp_path / "agent"],
            "aggregator": ["--rank", 0, "--of", 1, "--state", tmp_path / "rank", "--join", code],
            "authority serve": [tmp_path / "authority", "--coordinator", address],
        }
        typed = [ATOLL, *command.split(), *map(str, arguments[command])]
        with subprocess.Popen(typed, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert f"the coordinator at {address}" in process.stderr.readline()
            process.kill()


def test_a_task_that_loads_slowly_is_waited_for(tmp_path: Path) -> None:
    shutil.copy(TINY, slow := tmp_path / "slow_task.py")
    slow.write_text(f"import time\ntime.sleep(0.2)\n{slow.read_text()}")
    where = ["--set=coordinator.listen=127.0.0.1:0", "--state", tmp_path / "state"]
    for command in (["coordinator", "--check", *where], ["simulate", "--check"], ["agent", "--check", "--site", "a"]):
        result = invoke(*command, f"{slow}:task")
        assert result.exit_code == 0, result.output
        assert f"waiting for the task {slow}:task (its file and its libraries are imported)" in result.stderr


def test_nothing_is_said_of_a_short_wait(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SAY_S", BOUND_S)
    with waiting.waiting_for("Godot", "until he comes"):
        pass
    assert capsys.readouterr().err == ""


class Clock:
    """A clock that advances by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_is_told_now_and_then_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock, is_told = Clock(), False
    wait = waiting.TerminalWait("the bytes of a file", lambda: is_told, clock)
    clock.now = 5.0
    wait.advance(10, 100)
    is_told = True
    for clock.now in (9.0, 20.0, 25.0, 40.0):
        wait.advance(10, 100)
    said = capsys.readouterr().err.splitlines()
    assert said == ["the bytes of a file: 30%, 46.7 s left", "the bytes of a file: 50%, 40.0 s left"]
    assert wait.text(0) == "100%, 0.0 s left"


def test_a_caller_that_is_a_program_is_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[str] = []
    with reporting_to(Reporter(taken.append)), waiting_for("a file", "its end") as wait:
        wait.advance(1, 2)
    assert capsys.readouterr().err == ""
    assert taken == []


def test_a_terminal_sees_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, clock = Terminal(), Clock()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with waiting.TerminalWait("the bytes of a file", lambda: True, clock) as wait:
        clock.now = 3.0
        wait.advance(25, 100)
    assert "the bytes of a file" in terminal.getvalue()
    assert "25%, 9.0 s left" in terminal.getvalue()

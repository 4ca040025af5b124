"""The effect of signals on services: SIGTERM and SIGINT end them in order, SIGHUP where their terminal has closed."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.protocol.identity.join_code import JoinCode
from tests.cli.federation import ATOLL
from tests.cli.invoking import TINY
from tests.waiting import BOUND_S

NOBODY = str(JoinCode(("127.0.0.1:1",), bytes(32), bytes(8), bytes(16)))
WAITING = [("agent", f"{TINY}:task", "--site", "north"), ("aggregator", "--rank", "0", "--of", "1")]
"""Services that wait for a coordinator without an answer."""


@pytest.fixture(autouse=True)
def hangups() -> Iterator[None]:
    """Let children have the default effect of SIGHUP, whatever started the tests; `nohup` ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def code_of(child: int) -> int:
    """Return the exit code of a child once it has ended."""
    until = time.monotonic() + BOUND_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1])


def await_line(log: Path, words: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until a log has these words."""
    until = time.monotonic() + BOUND_S
    while not log.exists() or words not in log.read_text():
        assert process.poll() is None, log.read_text() if log.exists() else "no log"
        assert time.monotonic() < until, log.read_text() if log.exists() else "no log"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("arguments", WAITING)
def test_a_process_that_waits_to_enrol_ends_in_order(
    tmp_path: Path, arguments: tuple[str, ...], number: signal.Signals
) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        command = [str(ATOLL), *arguments, "--state", str(tmp_path / "state"), "--join", NOBODY]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        await_line(log, "trying again", process)
        process.send_signal(signal.SIGHUP)
        await_line(log, "SIGHUP: a service keeps running", process)
        process.send_signal(number)
        assert process.wait(BOUND_S) == 0
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("arguments", WAITING)
def test_a_service_whose_terminal_closes_ends_in_order(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code = tmp_path / "code"
    code.write_text(f"{NOBODY}\n")
    command = [str(ATOLL), *arguments, "--state", str(tmp_path / "state"), "--join", f"@{code}"]
    child, terminal = pty.fork()
    if child == 0:
        os.execv(command[0], command)
    shown = b""
    until = time.monotonic() + BOUND_S
    while b"trying again" not in shown:
        assert time.monotonic() < until, shown
        shown += os.read(terminal, 1024)
    os.close(terminal)
    assert code_of(child) == 0, shown


def test_a_command_whose_terminal_closes_saves_its_work_and_resumes(tmp_path: Path) -> None:
    command = [str(ATOLL), "simulate", f"{TINY}:task", "--out", str(tmp_path / "run"), "--set", "rounds=1000000"]
    child, terminal = pty.fork()
    if child == 0:
        os.execv(command[0], command)
    shown = b""
    rounds = tmp_path / "run" / "rounds.jsonl"
    until = time.monotonic() + BOUND_S
    while not rounds.exists() or not rounds.read_text():
        assert time.monotonic() < until, shown
        shown += os.read(terminal, 1024)
    os.close(terminal)
    assert code_of(child) == 130, shown
    done = len(rounds.read_text().splitlines())
    result = subprocess.run(
        [*command[:-1], f"rounds={done + 1}"], stderr=subprocess.PIPE, check=False, timeout=BOUND_S, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert len(rounds.read_text().splitlines()) == done + 1


def test_a_coordinator_survives_a_rotation_of_its_log_and_tells_its_service_manager(tmp_path: Path) -> None:
    log, rotated, state = tmp_path / "log", tmp_path / "log.1", str(tmp_path / "state")
    address = str(tmp_path / "notify")
    command = [str(ATOLL), "coordinator", "--state", state, "--set", "coordinator.listen=127.0.0.1:0", "--log", "json"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(BOUND_S)
        with log.open("ab") as file:
            environment = {**os.environ, "NOTIFY_SOCKET": address}
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            assert re.fullmatch(r"READY=1\nSTATUS=listening on 127.0.0.1:\d+", manager.recv(1024).decode())
            await_line(log, "no run yet", process)
            log.rename(rotated)
            process.send_signal(signal.SIGHUP)
            await_line(log, "SIGHUP", process)
            process.terminate()
            assert manager.recv(1024) == b"STOPPING=1"
            assert process.wait(BOUND_S) == 0
        finally:
            process.kill()
            process.wait()
    assert "SIGHUP" not in rotated.read_text()
    lines = [json.loads(line) for file in (rotated, log) for line in file.read_text().splitlines()]
    said = " ".join(line["message"] for line in lines)
    assert re.search("atoll coordinator on .* no run yet: .* SIGHUP: a service .* stopped by SIGTERM", said), said
    for line in lines:
        assert list(line) == ["time", "level", "process", "logger", "message"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert (line["process"], line["level"]) == ("coordinator", "info")


AWAY = ("--insecure", "--coordinator", "127.0.0.1:1")
OTHERS = [
    (("agent", f"{TINY}:task", "--site", "a", "--state", "state", *AWAY), r"a, dialling 127\.0\.0\.1:1"),
    (("dashboard", ".", "--listen", "127.0.0.1:0"), r"the pages are at http://127\.0\.0\.1:\d+/?"),
]


@pytest.mark.parametrize(("arguments", "status"), OTHERS, ids=["agent", "dashboard"])
def test_an_agent_and_a_dashboard_tell_their_service_manager_when_they_are_ready_and_when_they_stop(
    tmp_path: Path, arguments: tuple[str, ...], status: str
) -> None:
    address = str(tmp_path / "notify")
    (tmp_path / "simulated").mkdir()
    (tmp_path / "simulated" / "rounds.jsonl").touch()
    environment = {**os.environ, "NOTIFY_SOCKET": address, "XDG_RUNTIME_DIR": str(tmp_path)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(BOUND_S)
        with (tmp_path / "log").open("wb") as log:
            command = [str(ATOLL), *arguments]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path)
        try:
            assert re.fullmatch(f"READY=1\nSTATUS={status}", manager.recv(1024).decode())
            process.terminate()
            assert manager.recv(1024) == b"STOPPING=1"
            assert process.wait(BOUND_S) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()

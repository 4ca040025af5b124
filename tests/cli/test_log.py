"""The lines of a process's log: time, the site's name at an agent, level, message."""

import json
import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cli import log
from atoll.cli.printing import note
from atoll.protocol.identity.join_code import JoinCode
from tests.cli.federation import ATOLL
from tests.cli.invoking import TINY
from tests.federation.processes import federation
from tests.waiting import BOUND_S

WORDS = {"run": r"\b(trouble-1)\b", "round": r"\bround (\d+)\b", "site": r"^(?:client )?([ab]) |: ([ab]) reported"}
"""The texts that name a run, a round or a site in a line."""

UNREACHABLE = str(JoinCode(("127.0.0.1:1",), bytes(32), bytes(8), bytes(16)))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("atoll")
    before = (root.level, root.handlers[:], ours.level)
    yield
    os.environ.pop(log.VARIABLE, None)
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    ours.setLevel(before[2])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of standard error without their times, each of which is checked."""
    written = capsys.readouterr().err.splitlines()
    assert all(
        re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)
        for line in written
        if not line.startswith((" ", "Traceback", "OSError"))
    )
    return [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in written]


def test_a_process_without_a_name_writes_the_message_and_its_level(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("coordinator")
    logging.getLogger("atoll.server").info("round 1: closed (%s)", "enough")
    logging.getLogger("atoll.server").warning("the disk is full")
    logging.getLogger("atoll.server").debug("a detail")
    assert lines(capsys) == ["round 1: closed (enough)", "warning: the disk is full"]


def test_every_line_of_an_agent_has_its_site_s_name(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("agent", "100%d north")
    logging.getLogger("atoll.client").info("connected to %s", "127.0.0.1:7070")
    logging.getLogger("another.library").error("at fault")
    assert lines(capsys) == ["100%d north: connected to 127.0.0.1:7070", "100%d north: error: at fault"]


def test_the_notes_of_a_process_with_a_log_are_lines_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    note("before it has a log")
    assert capsys.readouterr().err == "before it has a log\n"
    log.configure("coordinator")
    note("atoll coordinator on 127.0.0.1:7070")
    thread = threading.Thread(target=note, args=("waiting for the state",))
    thread.start()
    thread.join()
    assert lines(capsys) == ["atoll coordinator on 127.0.0.1:7070", "waiting for the state"]


@pytest.mark.parametrize(("zone", "offset"), [("Europe/Berlin", "+02:00"), ("America/St_Johns", "-02:30"), ("UTC", "")])
def test_the_time_of_a_line_has_the_offset_of_its_zone(zone: str, offset: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        log.configure("coordinator")
        record = logging.makeLogRecord({"msg": "ready", "levelno": logging.INFO, "created": 1_780_000_000.0})
        logging.getLogger().handlers[0].handle(record)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert re.fullmatch(rf"2026-05-2\d \d\d:\d\d:\d\d{re.escape(offset)} ready\n", capsys.readouterr().err)


def test_a_traceback_follows_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("agent", "north")
    try:
        raise OSError("no space left")
    except OSError:
        logging.getLogger("atoll.client").exception("the spool")
    first, second, *_, last = lines(capsys)
    assert (first, second, last) == (
        "north: error: the spool",
        "Traceback (most recent call last):",
        "OSError: no space left",
    )


def test_the_second_of_two_configurations_counts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("agent", "north")
    log.configure("agent", "south")
    logging.getLogger("atoll").info("ready")
    assert lines(capsys) == ["south: ready"]


def test_a_line_for_a_program_is_an_object_with_stable_fields(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("agent", "north", "json")
    try:
        raise OSError("no space left")
    except OSError:
        logging.getLogger("atoll.client").exception("the \n spool of %s", "r-1", extra={"run": "r-1", "round": 3})
    [line] = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found.pop("traceback").endswith("OSError: no space left")
    assert found == {
        **{"level": "error", "process": "agent", "site": "north", "run": "r-1", "round": 3},
        **{"logger": "atoll.client", "message": "the \n spool of r-1"},
    }


@pytest.mark.real
def test_an_agent_s_process_writes_its_site_s_name(tmp_path: Path) -> None:
    written = tmp_path / "log"
    with written.open("wb") as file:
        command = [str(ATOLL), "agent", f"{TINY}:task", "--site", "north", "--join", UNREACHABLE]
        process = subprocess.Popen([*command, "--state", str(tmp_path / "state")], stdout=file, stderr=file)
    try:
        until = time.monotonic() + BOUND_S
        while "trying again" not in written.read_text():
            assert process.poll() is None, written.read_text()
            assert time.monotonic() < until, written.read_text()
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    found = written.read_text().splitlines()
    assert re.search(r" north: atoll [\d.]+ build [0-9a-f]{10}: the agent of north starts, for ", found[0])
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d north: ", line) for line in found), found


@pytest.mark.real
def test_every_line_of_a_federation_names_what_it_is_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_LOG", "json")
    with federation(tmp_path) as it:
        it.coordinator(rounds=2, round__cohort_size=2, round__quorum=2)
        for site in "ab":
            it.agent(site)
        assert it.wait_for_end() == 0
        logs = {name: it.log(name) for name in ("coordinator", "a", "b")}
    found = {
        name: [json.loads(line) for line in text.splitlines() if line.startswith("{")] for name, text in logs.items()
    }
    assert all(line["site"] == name for name in "ab" for line in found[name])
    for name, lines in found.items():
        assert sum("round" in line for line in lines) >= 6, name
        for line in lines:
            for field, pattern in WORDS.items():
                if (named := re.search(pattern, line["message"])) is not None:
                    value = next(group for group in named.groups() if group)
                    assert str(line.get(field)) == value, (name, line)


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-29 14:35:30 north: error: no data",
        "2026-11-29 14:35:30+02:00 north: error: no data",
        "2026-11-29 14:35:30 no data",
        "atoll: no data",
        "no data",
    ],
)
def test_a_line_has_its_message_without_time_site_and_level(line: str) -> None:
    assert log.message_of(line, "north") == "no data"

"""Kills of the process that a file names."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.drills.kills import NoProcess, kill, kill_again_and_again
from tests.waiting import BOUND_S

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[bytes]"]]:
    processes = list[subprocess.Popen[bytes]]()
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_what_a_file_names_is_killed_at_each_instant(tmp_path: Path, started: list["subprocess.Popen[bytes]"]) -> None:
    path, events = tmp_path / "pid", list[dict[str, Any]]()

    def supervise(_: float) -> None:
        if not started or started[-1].poll() is not None:
            started.append(subprocess.Popen(SLEEPER))
            path.write_text(f"{started[-1].pid}\n")

    def note(did: str, **details: Any) -> None:
        events.append({"did": did, **details})
        assert started[-1].wait(BOUND_S) == -9

    killed = kill_again_and_again(path, every_s=1.0, for_s=5.0, seed=2, on_event=note, sleep=supervise)
    assert 3 <= killed == len(started) <= 10
    assert [event["pid"] for event in events] == [process.pid for process in started]
    assert all(event["command"] for event in events)


def test_a_process_that_has_taken_the_number_is_left_alone(
    tmp_path: Path, started: list["subprocess.Popen[bytes]"]
) -> None:
    started.append(subprocess.Popen(SLEEPER))
    path = tmp_path / "pid"
    path.write_text(str(started[0].pid))
    os.utime(path, (0, path.stat().st_mtime - 60))
    with pytest.raises(NoProcess, match="another process has its number"):
        kill(path)
    assert started[0].poll() is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no file"),
        (b"", "has no number"),
        (b"\xff\xfe", "has no number"),
        (b"twelve", "has no number"),
        (b"-1", "may kill"),
        (b"0", "may kill"),
        (b"1", "may kill"),
        pytest.param(str(os.getpid()).encode(), "may kill", id="this process"),
        (b"4194305", "has ended"),  # above the largest number of Linux
    ],
)
def test_a_file_that_names_no_process_kills_none(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "pid").write_bytes(content)
    with pytest.raises(NoProcess, match=said):
        kill(tmp_path / "pid")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(NoProcess, match="cannot be read"):
        kill(tmp_path)

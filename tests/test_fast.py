"""The table of the real tests, and the guard under which a fast test may not act."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import fast

ROOT = Path(__file__).parents[1]

ACTING = """
import asyncio, socket, subprocess, sys, time

def test_process():
    subprocess.run([sys.executable, "-c", ""])

def test_port():
    socket.create_server(("127.0.0.1", 0)).close()

def test_sleep():
    time.sleep(0.001)

def test_sleep_of_a_task():
    asyncio.run(asyncio.sleep(0.001))

def test_turn_of_the_loop():
    time.sleep(0)
    asyncio.run(asyncio.sleep(0))
    left, right = socket.socketpair()
    left.close(), right.close()
"""


def test_every_entry_of_the_table_exists_once_and_in_order() -> None:
    assert list(fast.REAL) == sorted(set(fast.REAL))
    assert [entry for entry in fast.REAL if not (fast.TESTS / entry).exists()] == []
    assert fast.is_real(fast.TESTS / "wire" / "test_round.py")
    assert not fast.is_real(Path(__file__))


@pytest.mark.real
def test_the_guard_fails_a_test_that_acts_and_lists_it(tmp_path: Path) -> None:
    (tmp_path / "test_acting.py").write_text(ACTING)
    command = [sys.executable, "-m", "pytest", "-p", "tests.fast", "-p", "no:cacheprovider", "-q", str(tmp_path)]

    def run(*options: str) -> str:
        return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True).stdout

    failed = run()
    for name, what in [("process", "subprocess.Popen"), ("port", "socket.bind"), ("sleep", "a sleep")]:
        assert f"{what} in a fast test: mark it `real`" in failed
        assert f"test_acting.py::test_{name}" in failed
    assert "4 failed, 1 passed" in failed, failed
    listed = tmp_path / "listed"
    assert "5 passed" in run("--real-list", str(listed))
    assert [line.partition("::")[2].partition("\t")[0] for line in listed.read_text().splitlines()] == [
        *("test_process", "test_port", "test_sleep", "test_sleep_of_a_task")
    ]

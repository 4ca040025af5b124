"""A process ends in time, whatever holds it up."""

import signal
import subprocess
import sys

import pytest

from atoll.cli.command import Command
from tests.waiting import BOUND_S


def process(text):
    program = f"from atoll.cli.command import Command\nwith Command() as command: {text}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND_S)


@pytest.mark.parametrize(
    "held_up",
    [
        "import time; time.sleep(600)",
        "import ctypes; ctypes.PyDLL(None).sleep(600)  # with Python's lock",
        "import atexit, time; atexit.register(time.sleep, 600)",
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
    ],
)
def test_a_process_that_is_held_up_ends_all_the_same_and_says_where_it_was(held_up):
    ended = process(f"command.end_in_time(1)\n{held_up}")
    assert ended.returncode == -signal.SIGALRM
    assert "most recent call first" in ended.stderr


def test_a_process_that_ends_in_time_says_nothing():
    ended = process("command.end_in_time(60)")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "hanging", "arguments"),
    [
        (
            "coordinator",
            "hosting.coordinator:Coordinator",
            ["coordinator.listen=127.0.0.1:0", "coordinator.admin=127.0.0.1:0"],
        ),
        ("aggregator", "ranks.rank:Rank", ["listen=127.0.0.1:0", "coordinator=127.0.0.1:1", "rank=0", "ranks=1"]),
    ],
)
def test_a_signal_ends_what_cannot_end(command, hanging, arguments, tmp_path):
    module, name = hanging.split(":")
    program = f"""
import signal, time
from atoll.cli.command import Command
from atoll.cli.main import run
from atoll.server.{module} import {name}
end_in_time = Command.end_in_time
Command.end_in_time = lambda self: end_in_time(self, 1)
ends = lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0  # a rank also stops its work at each lost connection
{name}.stop = lambda self: time.sleep(600) if ends() else None
run()
"""
    words = [
        command,
        "--insecure",
        "--state",
        str(tmp_path / "state"),
        *(f"--set={argument}" for argument in arguments),
    ]
    whole = [sys.executable, "-c", program, *words]
    with subprocess.Popen(whole, stderr=subprocess.PIPE, text=True) as started:
        assert any(f" atoll {command}" in line for line in started.stderr)
        started.terminate()
        said = started.stderr.read()
    assert started.returncode == -signal.SIGALRM
    assert "most recent call first" in said


def test_commands_leave_a_process_alone_that_is_not_theirs():
    before = signal.getsignal(signal.SIGALRM)
    Command().end_in_time(600)
    assert signal.getsignal(signal.SIGALRM) is before

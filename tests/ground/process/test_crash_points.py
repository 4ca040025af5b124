"""Crash points: no-ops, unless the environment asks for one."""

import signal
import subprocess
import sys

import pytest

from atoll.ground.process.crash_points import STEPS, VARIABLE, parse_crash_at, reached

PROGRAM = """
from atoll.ground.process.crash_points import reached
for index in range(4):
    print(index, flush=True)
    reached("upload.before_check")
    reached("upload.mid_chunk")
    reached("exchange.entry", "even" if index % 2 == 0 else "odd")
"""


def run(crash_at: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM], env={VARIABLE: crash_at}, capture_output=True, text=True)


@pytest.mark.real
@pytest.mark.parametrize(
    ("crash_at", "num_printed"),
    [
        ("upload.mid_chunk", 1),
        ("upload.mid_chunk:1", 1),
        ("upload.mid_chunk:3", 3),
        ("exchange.entry:2", 2),
        ("exchange.entry/odd", 2),
        ("exchange.entry/even:2", 3),
    ],
)
def test_the_process_is_killed_at_the_nth_visit(crash_at: str, num_printed: int) -> None:
    ended = run(crash_at)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split() == [str(index) for index in range(num_printed)]


@pytest.mark.real
@pytest.mark.parametrize("crash_at", ["", "upload.mid_chunk:5", "agent.spooled"])
def test_the_process_lives_when_the_step_is_not_reached(crash_at: str) -> None:
    assert run(crash_at).returncode == 0


@pytest.mark.parametrize(
    "crash_at",
    ["upload", "upload.mid_chunk:", "upload.mid_chunk:0", "upload.mid_chunk:x", ":1", "exchange.entry/", "/even"],
)
def test_a_step_that_does_not_exist_is_refused(crash_at: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: step or step:n .* agent\.answered"):
        parse_crash_at({VARIABLE: crash_at})


def test_every_step_has_one_name_and_may_be_passed() -> None:
    names = [name for name, _ in STEPS]
    assert len(set(names)) == len(names)
    for name, meaning in STEPS:
        assert meaning
        assert parse_crash_at({VARIABLE: f"{name}:2"}) == (name, "", 2)
        reached(name)


def test_an_unknown_name_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="not in STEPS"):
        reached("upload.mid_chnk")

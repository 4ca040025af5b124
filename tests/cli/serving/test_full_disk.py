"""Processes that start on a disk without room, a real one: exit code 75 and one sentence; with room they start.

The disk is a tmpfs in a mount namespace of the process, which an ordinary user may make where the kernel allows it.
"""

import shlex
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.federation import ATOLL, TINY
from tests.parallel.trainer import tasks
from tests.waiting import BOUND_S

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount() -> bool:
    try:
        made = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return made.returncode == 0


pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not can_mount(), reason="this machine lets no user mount a tmpfs; a kernel with user namespaces does"
    ),
]

COMMANDS = {
    "agent": f"agent {TINY}:task --site a --insecure --coordinator 127.0.0.1:1 --state state",
    "aggregator": "aggregator --rank 0 --of 1 --insecure --coordinator 127.0.0.1:1 --state state",
    "coordinator": "coordinator --state state --set coordinator.listen=127.0.0.1:0",
    "authority": "authority init state",
    "train": f"train {Path(tasks.__file__)}:task --out state",
}
READY = {"agent": "no connection to", "aggregator": "atoll aggregator, rank", "coordinator": "atoll coordinator on"}
"""What a process says that has started."""


def shell(disk: Path, size: str, *lines: str) -> list[str]:
    """The command that runs lines of a shell on a disk of a size."""
    mount = f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(disk))} && cd {shlex.quote(str(disk))}"
    return [*NAMESPACE, "sh", "-c", "\n".join([mount, *lines])]


def check_told(text: str) -> None:
    """Check what a start without room says: one sentence, with what is needed, what there is, and what happens next."""
    (line,) = (line for line in text.splitlines() if "has no room" in line)
    assert "state has no room: " in line
    assert "are needed at least, and the disk has " in line
    assert line.endswith("a service manager starts it again by itself (exit code 75)")
    assert "Traceback" not in text


@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.parametrize("size", ["4k", *(pytest.param(size, marks=pytest.mark.long) for size in ("24k", "64k"))])
def test_a_start_on_a_full_disk_is_worth_another_try(what: str, size: str, tmp_path: Path) -> None:
    if (what, size) in {("aggregator", "24k"), ("aggregator", "64k"), ("authority", "24k"), ("authority", "64k")}:
        pytest.skip("this start has room enough in it")
    if what in READY and size == "4k":
        pytest.skip("the next test begins with it")
    ended = subprocess.run(
        shell(tmp_path, size, f"exec {ATOLL} {COMMANDS[what]}"),
        capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 75, ended.stderr
    check_told(ended.stderr)


@pytest.mark.parametrize("what", READY)
def test_what_a_full_disk_has_left_is_no_hindrance_when_there_is_room(what: str, tmp_path: Path) -> None:
    """The same command, again after a person has freed space."""
    command = f"{ATOLL} {COMMANDS[what]}"
    grown = "mount -o remount,size=64m tmpfs ."
    log = tmp_path / "log"
    (tmp_path / "disk").mkdir()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            shell(tmp_path / "disk", "4k", command, "echo code $? >&2", grown, f"exec {command}"),
            stdout=stream,
            stderr=stream,
        )
    try:
        until = time.monotonic() + BOUND_S
        while READY[what] not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        process.terminate()
        assert process.wait(BOUND_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    refused, code, _ = log.read_text().partition("code 75\n")
    assert code, log.read_text()
    check_told(refused)

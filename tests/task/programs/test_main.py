"""The process of a server program, with the coordinator's end of its socket in the test."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import BOUND_S

pytestmark = pytest.mark.real

PROGRAM = """
import atexit, pathlib, sys

def main(grid):
    atexit.register(pathlib.Path("log").write_text, "closed")
    {}
"""


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ("pass", {"op": "returned"}),
        ("sys.exit(0)", {"op": "returned"}),
        ("sys.exit(3)", {"op": "raised", "detail": "SystemExit: 3 (program.py, line 6)"}),
        ("raise KeyError(1)", {"op": "raised", "detail": "KeyError: 1 (program.py, line 6)"}),
    ],
)
def test_the_end_of_a_program_is_told_once_what_it_registered_for_its_exit_has_run(tmp_path: Path, ends, told):
    (tmp_path / "program.py").write_text(PROGRAM.format(ends))
    order = {"call": 0, "program": f"{tmp_path}/program.py:main", "options": {}, "seed": 1}
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as lines:
        command = [sys.executable, "-m", "atoll.task.programs.main", str(theirs.fileno())]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
            theirs.close()
            ours.settimeout(BOUND_S)
            ours.sendall(json.dumps(order).encode() + b"\n")
            assert json.loads(lines.readline()) == told
            assert (tmp_path / "log").read_text() == "closed"
            assert process.wait(BOUND_S) == 0

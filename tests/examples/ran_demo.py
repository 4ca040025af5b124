"""A demo that kills processes, run as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

ROOT = Path(__file__).parents[2]
MARK = "ATOLL_TEST_DEMO"


def ran_demo(name: str, out: Path, timeout_s: float) -> str:
    """Run a demo, check that it keeps its promises and leaves no process, and return what it prints."""
    mark = uuid4().hex
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert marked(mark) == []
    return done.stdout


def marked(mark: str) -> list[int]:
    """Return the processes that have a mark in the environment with which they were started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found

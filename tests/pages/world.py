"""The folder of a reader: a new project, and its run after some rounds."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.pages.given import SITES
from tests.pages.shell import BIN, ROOT, Shell
from tests.waiting import BOUND_S

NUM_ROUNDS = 7
"""Committed rounds of the run: more than any page asks for by number."""

OTHER = 'name = "other"\ntask = "task.py:task"\nrounds = 3\n'


def make_project(folder: Path) -> None:
    """Write a new project, with what the pages take for granted beside it."""
    subprocess.run([BIN / "atoll", "new", folder], check=True, capture_output=True)
    for name in ("examples", "Makefile", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "examples" / "digits.py", folder)
    shutil.copy(ROOT / "examples" / "policies.toml", folder)
    (folder / "other.toml").write_text(OTHER)


def begin_run(folder: Path, address: str) -> None:
    """Let three agents make some rounds of the project's run, and end them and the coordinator."""
    shell = Shell(folder, address)
    try:
        settings = "--set rounds=1000 --set round.selection_timeout=86400 --set coordinator.keep_versions=1000"
        shell.run(f"atoll coordinator run.toml {settings}", "the run")
        for site in SITES:
            invited = f"$(atoll client invite {site})"
            shell.run(f"atoll agent task.py:task --site {site} --config agent.toml --join {invited}", "the run")
        until = time.monotonic() + 2 * BOUND_S  # of many commands
        while _committed(folder) < NUM_ROUNDS:
            assert time.monotonic() < until, shell.output
            time.sleep(0.1)
    finally:
        shell.stop()
    shutil.copy(next((folder / "atoll-state" / "audit").glob("public*.pem")), folder / "audit-public.pem")


def _committed(folder: Path) -> int:
    """Return the number of versions that the run has made."""
    asked = subprocess.run(
        [BIN / "atoll", "model", "list", "--json"], cwd=folder, capture_output=True, env={**os.environ}, check=True
    )
    listed = json.loads(asked.stdout)
    return len(listed["versions"] if isinstance(listed, dict) else listed)

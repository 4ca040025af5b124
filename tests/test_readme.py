"""The commands and outputs of README.md, executed by real processes on loopback."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.operations.load import load_run
from atoll.protocol.settings import _toml
from atoll.simulations.experiments.grid import read_grid
from atoll.simulations.federation.config import SimulationFile
from benchmarks.processes import free_address
from tests.pages.due import when_due
from tools.docs import commands

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BIN = Path(sys.executable).parent
LIMIT_S = 400.0  # a bound for a loaded machine: the commands take half a minute

SHIM = """#!/usr/bin/env bash
# The program `atoll`, on a free port; the exit code of each call goes to a file.
case "$1" in
  coordinator) extra=(--set "coordinator.listen=$ADDRESS" --set "coordinator.enrol=127.0.0.1:0") ;;
  *) extra=() ;;
esac
"$REAL_ATOLL" "$@" "${extra[@]}"
code=$?
echo "$code $*" >> "$CODES"
exit $code
"""


def blocks(marker: str, page: str = README) -> list[str]:
    """Return the code blocks that follow `<!-- marker -->`."""
    return re.findall(rf"<!-- {marker} -->\n```[a-z]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Outcome:
    """The output of a script, and the exit code and arguments of each `atoll` in it."""

    output: str
    codes: list[str]
    is_over: bool

    @property
    def is_good(self) -> bool:
        return self.is_over and bool(self.codes) and all(line.startswith("0 ") for line in self.codes)


def execute(script: str, folder: Path) -> Outcome:
    """Run a script until it ends, one of its commands fails, or LIMIT_S have passed."""
    shims = folder / "bin"
    shims.mkdir()
    (shims / "atoll").write_text(SHIM)
    (shims / "atoll").chmod(0o755)
    codes, log = folder / "codes", folder / "log"
    codes.touch()
    address = free_address()
    environment = os.environ | {
        "PATH": f"{shims}:{BIN}:{os.environ['PATH']}",
        "ADDRESS": address,
        "REAL_ATOLL": str(BIN / "atoll"),
        "CODES": str(codes),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < until:
            if any(not line.startswith("0 ") for line in codes.read_text().splitlines()):
                break
            time.sleep(0.05)
        is_over = process.poll() == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session that was started above, and nothing else
        process.wait()
    return Outcome(log.read_text(), codes.read_text().splitlines(), is_over)


def essence(line: str) -> str:
    """Return a line without the parts that differ between runs: numbers, digests, names of sites, widths."""
    line = re.sub(r"\b[0-9a-f]{12}\b|(?<=build )[0-9a-f]{10}\b", "DIGEST", line)
    line = re.sub(r"\d+(\.\d+)?", "0", line)
    line = re.sub(r"\b(north|south|east)\b", "SITE", line)
    return " ".join(line.split())


def unseen(expected: str, output: str) -> list[str]:
    """Return the lines of an expected output that are missing in an output."""
    seen = {essence(line) for line in output.splitlines()}
    return [line for line in expected.splitlines() if line not in ("", "...") and essence(line) not in seen]


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("page", [when_due("README.md", page="README.md", number=5)])
def test_the_commands_of_the_readme_end_in_a_committed_model(page: str, tmp_path: Path) -> None:
    outcome = execute("".join(blocks("run", (ROOT / page).read_text("utf-8"))), tmp_path)
    assert outcome.is_good, outcome
    assert len(outcome.codes) == 10
    for expected in blocks("output"):
        assert unseen(expected, outcome.output) == [], outcome.output
    assert (tmp_path / "digits" / "model.safetensors").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_commands_of_the_examples_end_in_a_committed_model(tmp_path: Path) -> None:
    page = (ROOT / "examples" / "README.md").read_text("utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    federation, *simulations = blocks("run", page)
    outcome = execute(federation.replace("/tmp/", f"{tmp_path}/"), tmp_path)
    assert outcome.is_good, outcome
    assert re.search(r"^10 .*accuracy", outcome.output, re.MULTILINE), outcome.output
    for number, script in enumerate(simulations):
        (apart := tmp_path / f"apart-{number}").mkdir()
        (apart / "examples").symlink_to(ROOT / "examples")
        outcome = execute(script.replace("/tmp/", f"{apart}/"), apart)
        assert outcome.is_good, outcome
        assert outcome.output.count("finished: 10 rounds are committed") == script.count("atoll simulate")


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("--site", "--sight"), ("atoll round show 5", "atoll round show 6"), ("atoll new digits", "atoll knew digits")],
)
def test_a_command_of_the_readme_that_breaks_is_noticed(right: str, wrong: str, tmp_path: Path) -> None:
    script = "".join(blocks("run"))
    assert right in script
    if right == "atoll round show 5":  # the round is never reached: the commands before it are not repeated here
        script = blocks("run")[1]
    outcome = execute(script.replace(right, wrong), tmp_path)
    assert not outcome.is_good


def test_an_output_of_the_readme_that_is_not_true_is_noticed() -> None:
    output = "14:38:09 digits-1: round 1: committed as version 1\n14:38:09 north: connected\n"
    assert unseen("09:00:00 digits-2: round 4: committed as version 4\n...\n09:00:00 east: connected\n", output) == []
    assert unseen("14:38:09 digits-1: round 1: abandoned\n", output) == ["14:38:09 digits-1: round 1: abandoned"]
    assert unseen("14:38:09 connected\n", output) == ["14:38:09 connected"]


def test_the_readme_is_short_and_has_blocks_to_run() -> None:
    assert len(README.split()) < 800
    assert len(blocks("run")) == len(blocks("output")) == 2


def test_the_measured_figures_of_the_readme_are_those_of_the_page_of_measurements() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8").splitlines()
    measured = "\n".join(page[i] for i, line in enumerate(page) if re.search("round_vs_flower|x 100 MB", line))
    rows = re.findall(r"^\| a round of .*? \| ([\d.]+) s \| ([\d.]+) s \(([\d.]+) times\) \|$", README, re.MULTILINE)
    assert len(rows) == 2
    for figure in (figure for row in rows for figure in row):
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", measured), figure


def test_every_make_target_of_the_readme_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)|(?:`|&& )make ([a-z-]+)", README, re.MULTILINE))
    names = {name for pair in named for name in pair if name}
    assert {"demo", "test", "setup"} <= names <= targets


def test_every_atoll_command_of_the_readme_is_there() -> None:
    there = {path for path, _ in commands()} | {path.rsplit(" ", 1)[0] for path, _ in commands()}
    named = re.findall(r"(?:^|`|do )(atoll [a-z]+(?: (?:start|stop|resume|list|show|export)\b)?)", README, re.MULTILINE)
    assert named
    assert set(named) <= there


SWEEPS = [path for path in sorted((ROOT / "examples").glob("*.toml")) if "\n[sweep]" in path.read_text("utf-8")]


@pytest.mark.parametrize("path", sorted({*(ROOT / "examples").glob("*.toml")} - {*SWEEPS}), ids=lambda path: path.name)
def test_the_settings_of_every_example_are_allowed(path: Path) -> None:
    assert load_run(str(path)).task.startswith(str(ROOT / "examples"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_every_cell_of_an_example_s_sweep_is_allowed(path: Path) -> None:
    cells = read_grid(path).cells
    assert len(cells) > 1
    for cell in cells:
        overrides = [f"{key}={_toml(value)}" for key, value in cell.settings.items()]
        assert load_run(f"examples/{cell.task}", overrides, kind=SimulationFile).rounds > 1

"""The completion of a shell's words, by the protocol of each shell: the environment in, lines out."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.cli.completion import SECTIONS
from atoll.cli.sections import Section
from atoll.server.journal.state_directory import StateDirectory
from tests.waiting import BOUND_S

PROGRAM = """
import atexit, json, sys
atexit.register(lambda: print("MODULES", json.dumps(sorted(sys.modules)), file=sys.stderr))
from atoll.cli.main import run
sys.argv = ["atoll"]
run()
"""


def completed(folder: Path, line: str, shell: str = "bash") -> tuple[list[str], set[str]]:
    """Return the lines that a shell reads for a command line, whose last word is completed, and the modules."""
    words = line.split()
    position = len(words) if line.endswith(" ") else len(words) - 1
    of_shell = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(position)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | of_shell[shell] | {"_ATOLL_COMPLETE": f"complete_{shell}"},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        cwd=folder,
    )
    assert "Traceback" not in done.stderr, done.stderr
    (modules,) = [line for line in done.stderr.splitlines() if line.startswith("MODULES ")]
    return [line for line in done.stdout.splitlines() if line], set(json.loads(modules.removeprefix("MODULES ")))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a state directory of two runs and a member."""
    folder = tmp_path_factory.mktemp("completion")
    with StateDirectory.open(folder / "atoll-state"):
        pass
    with sqlite3.connect(folder / "atoll-state" / "state.db") as database:
        for number, name in enumerate(("digits-1", "words-1")):
            row = (name, name[:-2], "task.py:task", "{}", "{}", 0.0, number, "running", "")
            columns = 'run_id, name, task, config, rules, created_at, "order", state, cause'
            database.execute(f"INSERT INTO runs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    return folder


@pytest.mark.real
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("atoll run sh", ["show"]),
        ("atoll run show --sit", ["--sites"]),
        ("atoll run show ", ["words-1", "digits-1"]),
        ("atoll run show d", ["digits-1"]),
        ("atoll run show --state elsewhere ", []),
        ("atoll round list --run w", ["words-1"]),
        ("atoll coordinator --set round.quo", ["round.quorum="]),
        ("atoll train --set local.momen", ["local.momentum="]),
        ("atoll agent --set upload_l", ["upload_limit="]),
        ("atoll settings simu", ["simulation"]),
        ("atoll --inst", ["--install-completion"]),
    ],
)
def test_bash_completes_commands_options_runs_and_settings_without_torch(
    line: str, expected: list[str], place: Path
) -> None:
    found, modules = completed(place, line)
    assert found == expected
    assert modules.isdisjoint(("torch", "numpy", "grpc", "sqlalchemy"))


@pytest.mark.real
def test_zsh_and_fish_also_show_what_a_value_means(place: Path) -> None:
    assert completed(place, "atoll run show d", "fish")[0] == ["digits-1\ttask.py:task, running"]
    (line,) = completed(place, "atoll run show d", "zsh")[0]
    assert '"digits-1":"task.py\\\\:task, running"' in line


@pytest.mark.real
def test_a_state_directory_that_cannot_be_read_completes_nothing(tmp_path: Path) -> None:
    (tmp_path / "atoll-state").mkdir()
    (tmp_path / "atoll-state" / "state.db").write_bytes(b"no database")
    assert completed(tmp_path, "atoll run show ")[0] == []


@pytest.mark.real
@pytest.mark.parametrize(
    ("shell", "file"),
    [
        ("bash", ".bash_completions/atoll.sh"),
        ("zsh", ".zfunc/_atoll"),
        ("fish", ".config/fish/completions/atoll.fish"),
    ],
)
def test_the_installed_script_of_each_shell_calls_the_program(shell: str, file: str, tmp_path: Path) -> None:
    explicit = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}

    def run(option: str) -> str:
        command = [str(Path(sys.executable).with_name("atoll")), option, shell]
        environment = os.environ | explicit
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    script = run("--show-completion")
    assert f"_ATOLL_COMPLETE=complete_{shell}" in script
    run("--install-completion")
    assert (tmp_path / file).read_text().strip() == script.strip()


def test_the_sections_of_each_command_exist() -> None:
    names = {section.value for section in Section}
    assert [name for sections in SECTIONS.values() for name in sections if name not in names] == []

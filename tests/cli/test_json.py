"""The option --json: every command that shows something has it, its keys are documented, and its output is JSON."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from atoll.server.identity.register import Register
from atoll.server.journal.state_directory import StateDirectory
from tests.cli.invoking import TINY, invoke, refused
from tools import docs

WITHOUT = {
    "atoll audit export": "it writes JSON lines, unchanged from the log",
    "atoll dashboard": "its pages are JSON at their addresses with `.json`",
    "atoll flower run": "its end is that of the app's main(); `atoll run show` shows its run",
    "atoll authority serve": "it shows nothing but its log",
    "atoll chaos proxy": "all that it writes are JSON lines",
    "atoll chaos kill": "all that it writes are JSON lines",
}
"""The commands without --json, each with the reason."""


def documented() -> dict[str, str]:
    """Return the row of each command in the table of keys."""
    section = (docs.DOCS / "commands.md").read_text("utf-8").partition("## The JSON of `--json`")[2]
    rows = [line.strip("| ").split(" | ", 1) for line in section.splitlines() if line.startswith("| `atoll")]
    return {command: keys for commands, keys in rows for command in re.findall(r"`(atoll[^`]*)`", commands)}


def test_every_command_that_shows_something_has_json() -> None:
    lacking = {path for path, command in docs.commands() if all("--json" not in p.opts for p in command.params)}
    assert lacking == WITHOUT.keys()


def test_the_keys_of_every_command_are_documented() -> None:
    assert documented().keys() == {path for path, _ in docs.commands()} - WITHOUT.keys()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a state directory, an authority and a request to it."""
    monkeypatch.chdir(tmp_path)
    with StateDirectory.open(tmp_path / "state") as state:
        Register(state.database)
    shutil.copy(TINY, tmp_path / "task.py")
    invoke("backup", "state", "made")
    invoke("authority", "init", "authority")
    invoke("authority", "request", "olga", "--out", "request")
    invoke("authority", "issue", "authority", "olga", "--role", "operator", "--request", "request", "--out", "answer")
    return tmp_path


def strict(text: str) -> Any:
    """Parse JSON; a bare NaN or Infinity, which Python accepts, is refused."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "line",
    [
        "new project",
        "authority init other",
        "authority show authority",
        "authority request hugo --out request-2",
        "authority issue authority south --out south",
        "authority install olga answer --admin localhost:7072",
        "client members --state state",
        "backup make state copy",
        "backup verify made",
    ],
)
def test_the_documented_keys_are_those_of_the_output(line: str, folder: Path) -> None:
    words = line.split()
    path = " ".join(["atoll", *words[: 1 if words[0] == "new" else 2]])
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    found = strict(result.stdout)
    names = set(re.findall(r"`(\w+)`", documented()[path]))
    assert all(each.keys() == names for each in (found if isinstance(found, list) else [found]))


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("coordinator task.py:task --check", "rounds"),
        ("coordinator --check", "coordinator"),
        ("agent task.py:task --site a --check", "site"),
        ("aggregator --rank 0 --of 1 --state rank --check", "ranks"),
        ("simulate task.py:task --check", "simulation"),
        ("run list --state state", None),
        ("settings agent", "agent"),
        ("plan llama-8b", "model"),
    ],
)
def test_what_is_shown_is_shown_as_json(line: str, key: str | None, folder: Path) -> None:
    result = invoke(*line.split(), "--json")
    assert result.exit_code == 0, result.output
    found = strict(result.stdout)
    assert found == [] if key is None else key in found


def test_the_settings_of_check_are_the_same_as_json(folder: Path) -> None:
    """Settings of infinite value are null in JSON."""
    assert strict(invoke("coordinator", "task.py:task", "--check", "--json", "--set", "rounds=7").stdout)["rounds"] == 7


@pytest.mark.parametrize("line", ["coordinator", "agent T --site a", "aggregator --rank 0 --of 1 --state rank"])
def test_json_without_check_is_refused_by_a_process(line: str, folder: Path) -> None:
    assert "--json prints the settings of --check" in refused(*line.replace("T", "task.py:task").split(), "--json")[0]

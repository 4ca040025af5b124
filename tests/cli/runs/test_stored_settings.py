"""Stored settings that this Atoll does not allow: each command that reads them says so in one sentence, exit code 2."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.vocabulary import RunId
from atoll.server.errors import StoreCorrupted
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import config_of
from atoll.server.journal.state_directory import StateDirectory
from tests.cli.invoking import refused
from tests.server.views.test_history import write_history

SENTENCE = (
    "run r: this Atoll does not allow its stored settings: privacy.delta: missing; allowed: number > 0, < 1; "
    "privacy.zz: unknown key (known: unit, epsilon,"
)
COMMANDS = (
    ("run", "list"),
    ("run", "show", "r"),
    ("round", "list", "--run", "r"),
    ("round", "show", "1", "--run", "r"),
    ("model", "list", "--run", "r"),
    ("model", "export", "1", "--run", "r", "--out", "o.safetensors"),
    ("client", "list"),
    ("privacy", "show", "r"),
    ("export", "jsonl", "r", "--to", "out"),
    ("coordinator", "--insecure"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with an ended run, whose stored settings another Atoll has written."""
    monkeypatch.chdir(tmp_path)
    with StateDirectory.open(tmp_path / "state", database="") as state:
        write_history(state)
    with closing(sqlite3.connect(tmp_path / "state" / "state.db")) as database, database:
        (text,) = database.execute("SELECT config FROM runs").fetchone()
        document = json.loads(text) | {"privacy": {"epsilon": 1.0, "clip_norm": 1.0, "zz": 3}}
        database.execute("UPDATE runs SET config = ?", [json.dumps(document)])
    return tmp_path / "state"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_a_command_that_reads_refused_settings_says_one_sentence(folder: Path, command: tuple[str, ...]) -> None:
    [fault] = refused(*command, "--state", folder)
    assert SENTENCE in fault
    assert fault.endswith(": use the Atoll that has written them, or restore a backup of the state directory")
    assert "validation error" not in fault


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"task": 1}', "\ud800"])
def test_settings_of_any_form_are_a_sentence(text: str) -> None:
    with pytest.raises(StoreCorrupted, match=r"^run r: this Atoll does not allow its stored settings: [^\n]+$"):
        config_of(text, RunId("r"))


def test_the_settings_before_a_resume_are_a_sentence_too(folder: Path) -> None:
    with StateDirectory.open(folder, database="") as state:
        with state.database.transaction() as connection:
            connection.exec_driver_sql("INSERT INTO meta VALUES ('first settings of run r', '{}')")
            keys: Any = connection.exec_driver_sql("SELECT key FROM meta").scalars().all()
        with pytest.raises(StoreCorrupted, match="run r: this Atoll does not allow its stored settings: task: missing"):
            Journal(state).first_settings(RunId("r"))
    assert "first settings of run r" in keys

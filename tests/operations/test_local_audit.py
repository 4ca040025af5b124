"""Audit events of commands that act without a coordinator: their actor is the operating system's user."""

import os
import pwd
from pathlib import Path

import pytest

from atoll.operations import local_audit
from atoll.protocol.audit.files import AuditFiles, audit_folder
from atoll.server.audit.actions import Action
from atoll.server.audit.reading import Source, events_of


@pytest.fixture
def state(tmp_path: Path) -> Path:
    AuditFiles(audit_folder(tmp_path), lambda: 0.0).close()
    return tmp_path


def _events(state: Path) -> list[tuple[str, str]]:
    lines = [line.event for line in events_of(Source.of_state(state))]
    return [(event.actor, event.outcome) for event in lines if event is not None]


def test_the_actor_is_the_uid_with_its_name_whatever_the_environment_claims(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody-else")
    local_audit.record_local_action(state, Action.MODEL_EXPORT, "x")
    name = pwd.getpwuid(os.getuid()).pw_name
    assert _events(state) == [(f"{name} (uid {os.getuid()})", "ok")]


def test_a_uid_without_an_entry_is_an_actor_too(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_123)
    local_audit.record_local_action(state, Action.STATE_BACKUP, "x")
    assert _events(state) == [("uid 4000123", "ok")]


def test_an_action_has_a_line_before_it_begins_and_one_for_its_end(state: Path) -> None:
    with local_audit.recorded(state, Action.STATE_BACKUP, "x"):
        assert [outcome for _, outcome in _events(state)] == ["begun"]
    with pytest.raises(ZeroDivisionError), local_audit.recorded(state, Action.STATE_BACKUP, "x"):
        raise ZeroDivisionError
    assert [outcome for _, outcome in _events(state)] == ["begun", "ok", "begun", "failed"]


def test_an_action_that_fails_on_a_strange_directory_leaves_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), local_audit.recorded(tmp_path, Action.STATE_BACKUP, "x"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())

"""What is refused before a command waits for a coordinator."""

import time
from pathlib import Path

import pytest

from atoll.cli import waiting
from atoll.cli.group import TERMINAL
from atoll.operations import admin
from atoll.operations.reporter import reporting_to
from atoll.protocol.identity.names import Role
from tests.cli.invoking import refused


@pytest.mark.parametrize("verb", ["invite", "revoke"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no/name"], "name 'no/name': allowed are 1 to 64 letters"),
        (["-x"[1:] * 65], "allowed are 1 to 64 letters"),
        (["main", "--role", "coordinator"], "can be neither invited nor revoked"),
        (["007", "--role", "aggregator"], "an aggregator's name is its number"),
    ],
)
def test_a_name_that_no_member_can_have_is_refused_at_once(
    verb: str, arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", None)  # to wait is a TypeError
    (told,) = refused("client", verb, *arguments, "--state", tmp_path / "none")
    assert words in told


@pytest.mark.real
def test_a_wait_for_a_coordinator_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "SAY_S", 0.0)
    monkeypatch.setattr(admin, "STARTING_S", 0.2)
    with pytest.raises(admin.CommandError, match="no coordinator holds"), reporting_to(TERMINAL):
        admin.invite(tmp_path, Role.CLIENT, "north", 3600.0)
    assert capsys.readouterr().err.count("(up to 0.2 s, as one may be starting)") == 1

"""What a site remembers for its policy: durable, bound to the terms, and no answer when it cannot be read."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.client.policy.decide import History, Kind, PolicyRequest, Standing
from atoll.client.policy.history import NAME, RUNS_MAX, HistoryUnusable, NoSuchRun, PolicyHistory

DAY = "2026-05-04"


def request(number: int = 1, run_id: str = "r-1", task: str = "t") -> PolicyRequest:
    return PolicyRequest(kind=Kind.TRAIN, run_id=run_id, task=task, number=number)


def test_rounds_are_counted_once_and_by_day(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    for number in (1, 1, 2):
        history.begun("r-1", number, DAY)
    history.begun("r-1", 1, "2026-05-05")
    assert history.of(request(1), local=None, day=DAY) == History(rounds_today=2, is_counted=True)
    assert history.of(request(3), local=None, day="2026-05-05") == History(rounds_today=0, is_counted=False)


def test_what_was_counted_and_decided_survives_kill_9(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from atoll.client.policy.decide import Standing
from atoll.client.policy.history import PolicyHistory
history = PolicyHistory(Path({str(tmp_path)!r}))
history.asked("r-1", "t", "{{}}", 1.0)
history.decided("r-1", Standing.APPROVED, 2.0)
history.begun("r-1", 7, {DAY!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60)
    assert done.returncode == -signal.SIGKILL
    found = PolicyHistory(tmp_path).of(request(7), local="{}", day=DAY)
    assert found == History(standing=Standing.APPROVED, rounds_today=1, is_counted=True)


def test_an_approval_is_for_the_terms_it_was_given_on(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)

    def standing(task: str = "t", local: str | None = "{}") -> Standing:
        return history.of(request(task=task), local=local, day=DAY).standing

    assert history.asked("r-1", "t", "{}", 1.0)
    assert not history.asked("r-1", "t", "{}", 2.0)
    history.decided("r-1", Standing.APPROVED, 3.0)
    assert [standing(), standing(local=None)] == [Standing.APPROVED] * 2
    assert [standing(task="u"), standing(local='{"lr":1}')] == [Standing.UNDECIDED] * 2
    assert history.asked("r-1", "t", '{"lr":1}', 4.0)
    assert standing(local='{"lr":1}') is Standing.UNDECIDED
    history.decided("r-1", Standing.REJECTED, 5.0)
    assert history.asked("r-1", "u", "{}", 6.0)
    assert standing(task="u") is Standing.REJECTED, "other terms do not undo a rejection"


def test_who_never_asked_cannot_be_decided_about_or_forgotten(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    for change in (lambda: history.decided("r-1", Standing.APPROVED, 1.0), lambda: history.forget("r-1")):
        with pytest.raises(NoSuchRun):
            change()
    assert history.runs() == []
    history.asked("r-1", "t", "{}", 1.0)
    history.forget("r-1")
    assert history.runs() == []


def test_another_process_is_noticed(tmp_path: Path) -> None:
    agent, command = PolicyHistory(tmp_path), PolicyHistory(tmp_path)
    agent.asked("r-1", "t", "{}", 1.0)
    before = agent.change
    assert agent.change == before
    command.decided("r-1", Standing.APPROVED, 2.0)
    assert agent.change != before


def test_runs_that_nobody_decided_about_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.client.policy.history.RUNS_MAX", 3)
    assert RUNS_MAX > 3
    history = PolicyHistory(tmp_path)
    history.asked("kept", "t", "{}", 0.0)
    history.decided("kept", Standing.REJECTED, 0.5)
    for number in range(6):
        history.asked(f"r-{number}", "t", "{}", 1.0 + number)
    assert [terms.run_id for terms in history.runs()] == ["kept", "r-3", "r-4", "r-5"]


@pytest.mark.parametrize("damage", ["garbage", "newer", "standing"])
def test_what_cannot_be_read_gives_no_answer(tmp_path: Path, damage: str) -> None:
    if damage == "garbage":
        (tmp_path / NAME).write_bytes(b"no database" * 1000)
    else:
        PolicyHistory(tmp_path).asked("r-1", "t", "{}", 1.0)
        with sqlite3.connect(tmp_path / NAME) as database:
            change = "PRAGMA user_version = 9" if damage == "newer" else "UPDATE runs SET standing = 'fine'"
            database.execute(change)
        database.close()
    with pytest.raises(HistoryUnusable, match=NAME):
        PolicyHistory(tmp_path).of(request(), local=None, day=DAY)

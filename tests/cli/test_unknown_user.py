"""Commands of a user without an entry in passwd and without HOME, as in a container that is started with a bare uid."""

import asyncio
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from atoll.client.policy.decide import Kind, PolicyRequest
from atoll.client.policy.history import PolicyHistory
from atoll.server.audit.actions import Action
from atoll.server.audit.reading import Source, events_of
from tests.cli.federation import ATOLL
from tests.debian import missing
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running
from tests.wire.test_round import live, report

UID = 12345
"""A number that no machine gives to a user by itself: below it lie services and people, above it containers."""

READS_ALL = [
    *("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]
"""The user may also read, and not write, what others keep to themselves: where Python lies in root's home."""

ASKS = PolicyRequest(kind=Kind.EVALUATE, run_id="digits-1", task="digits:task", number=1, local='{"lr": 0.1}')


@functools.cache
def prefix() -> tuple[str, ...] | None:
    """What begins a command of the user; None: this process may not act for another user, or setpriv is missing."""
    if os.getuid() != 0:
        return None
    try:
        subprocess.run([sys.executable, "-c", "import encodings"], user=UID, group=UID, extra_groups=[], check=True)
        return ()
    except (PermissionError, subprocess.CalledProcessError):
        return tuple(READS_ALL) if shutil.which("setpriv") else None


pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(os.getuid() != 0, reason="only root may act for another user: run the tests in a container"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the user; those of pytest may be entered by their owner alone."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="atoll-uid-") as name:
        yield Path(name)


def given_to_the_user(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, UID, UID, follow_symlinks=False)


def done(folder: Path, *arguments: object) -> str:
    """The output of a command of the user."""
    start = prefix()
    if start is None:
        pytest.skip(f"Python lies where only root may go: {missing('setpriv')}")
    as_user: dict[str, Any] = {} if start else {"user": UID, "group": UID, "extra_groups": []}
    without = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME")}
    ended = subprocess.run(
        [*start, ATOLL, *map(str, arguments)],
        cwd=folder, env=without, capture_output=True, text=True, timeout=BOUND_S, check=False, **as_user,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "not written to the audit log" not in ended.stderr
    return ended.stdout


def actors(state: Path, action: Action) -> list[tuple[str, str]]:
    events = [line.event for line in events_of(Source.of_state(state))]
    return [(event.actor, event.outcome) for event in events if event is not None and event.action == action]


@live
async def test_an_export_and_a_backup_are_in_the_audit_log_under_the_bare_uid(folder):
    state = folder / "state"
    async with running(state, rounds=1) as it, it.client("a") as a, it.client("b") as b:
        await asyncio.gather(report(a), report(b))
        assert (await a.next("run_ended")).state == "finished"
    given_to_the_user(folder)
    done(folder, "model", "export", "--run", "tiny-1", "--out", folder / "model.safetensors", "--state", state)
    assert (folder / "model.safetensors").stat().st_uid == UID
    assert actors(state, Action.MODEL_EXPORT) == [(f"uid {UID}", "begun"), (f"uid {UID}", "ok")]
    done(folder, "backup", state, folder / "copy.tar")
    assert (folder / "copy.tar").stat().st_uid == UID
    assert actors(state, Action.STATE_BACKUP) == [(f"uid {UID}", "begun"), (f"uid {UID}", "ok")]
    done(folder, "restore", folder / "copy.tar", folder / "again")
    assert actors(folder / "again", Action.STATE_RESTORE) == [(f"uid {UID}", "ok")]
    assert "state.backup" in done(folder, "audit", "show", "--state", state)


def test_an_approval_of_a_site_needs_no_home(folder: Path) -> None:
    state = folder / "atoll-agent-north"
    state.mkdir()
    with closing(PolicyHistory(state)) as history:
        history.asked(ASKS, 1_777_896_000.0)
    given_to_the_user(folder)
    assert "approved" in done(folder, "site", "approve", "digits-1")
    assert "approved" in done(folder, "site", "list")
    done(folder, "site", "reject", "digits-1", "--state", state)
    done(folder, "site", "forget", "digits-1", "--state", state)
    shown = done(folder, "audit", "show", "--json", *sorted((state / "decisions").glob("audit-*.jsonl")))
    assert shown.count(f'"uid {UID}"') == 3
    for action in ("site.approved", "site.rejected", "site.forgotten"):
        assert shown.count(f'"{action}"') == 1

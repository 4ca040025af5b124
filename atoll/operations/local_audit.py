"""Audit events of commands that act on a state directory themselves, without its coordinator."""

import os
import pwd
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from atoll.operations.reporter import note, waiting_for

if TYPE_CHECKING:
    from atoll.server.audit.actions import Action

BEGUN, FAILED = "begun", "failed"
"""Outcomes: started, unfinished."""


def os_user() -> str:
    """Return the operating system's user of this process as `NAME (uid N)`, or `uid N` for a uid without an entry.

    The environment (LOGNAME, USER) decides nothing, because everyone sets it at will.
    """
    uid = os.getuid()
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


@contextmanager
def recorded(
    state: Path, action: "Action", object_: str, digests: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """Record an action before and after the block that carries it out, so that none goes without a line in the log.

    A directory without a log, which need not be a coordinator's, gets one only after the action has succeeded.
    """
    from atoll.protocol.audit.files import audit_folder

    has_log = audit_folder(state).is_dir()
    is_written = has_log and record_local_action(state, action, object_, BEGUN, digests)
    outcome = FAILED
    try:
        yield
        outcome = "ok"
    finally:
        if is_written or (not has_log and outcome == "ok"):
            record_local_action(state, action, object_, outcome, digests)


def record_local_action(
    state: Path,
    action: "Action",
    object_: str,
    outcome: str = "ok",
    digests: Mapping[str, str] = MappingProxyType({}),
) -> bool:
    """Append one signed event, with the operating system's user as actor; a coordinator may run at the same time.

    A user who may read a model but not write to the directory gets a note that the event is not in the log.

    Returns:
        whether the event is in the log.
    """
    from atoll.protocol.audit.chain import Event, instant
    from atoll.protocol.audit.files import AuditFiles, audit_folder

    try:
        folder = audit_folder(state)
        with waiting_for(f"the lock of the audit log {folder}", "until its holder has written its events"):
            files = AuditFiles(folder, time.time)
            try:
                files.append(
                    [Event(instant(time.time()), os_user(), "local", action, object_, outcome, digests)], sign=True
                )
            finally:
                files.close()
    except OSError as error:
        note(f"not written to the audit log: {error}")
        return False
    return True


def record_at_site(state: Path, action: str, run: str, outcome: str, user: str = "") -> None:
    """Append a person's decision about a run to a site's log of decisions, with the operating system's user as actor.

    Args:
        state: the agent's state directory; its agent may run.
        action: `site.approved`, `site.rejected` or `site.forgotten`.
        run: the run's id.
        outcome: the terms of the decision.
        user: the person for whom the user of this process has decided; empty: that user.
    """
    from atoll.client.policy.decisions import NAME
    from atoll.protocol.audit.chain import Event, instant
    from atoll.protocol.audit.files import AuditFiles

    try:
        with waiting_for(f"the lock of {state / NAME}", "until its holder has written its events"):
            files = AuditFiles(state / NAME, time.time, writer="agent")
            try:
                event = Event(instant(time.time()), os_user(), "local", action, run, outcome, on_behalf_of=user)
                files.append([event], sign=True)
            finally:
                files.close()
    except OSError as error:
        note(f"not written to the log of decisions: {error}")

"""Audit events of commands that act on a state directory themselves, without its coordinator."""

import getpass
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from atoll.cli.printing import note

if TYPE_CHECKING:
    from atoll.server.audit.actions import Action


def record_local_action(
    state: Path,
    action: "Action",
    object_: str,
    outcome: str = "ok",
    digests: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Append one signed event, with the operating system's user as actor; a coordinator may run at the same time.

    A user who may read a model but not write to the directory gets a note that the event is not in the log.
    """
    from atoll.protocol.audit.chain import Event, instant
    from atoll.protocol.audit.files import AuditFiles, audit_folder

    try:
        files = AuditFiles(audit_folder(state), time.time)
        try:
            event = Event(instant(time.time()), getpass.getuser(), "local", action, object_, outcome, digests)
            files.append([event], sign=True)
        finally:
            files.close()
    except OSError as error:
        note(f"not written to the audit log: {error}")

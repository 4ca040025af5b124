"""What a command did to a state directory by itself, without asking its coordinator, into the audit log there."""

import getpass
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from atoll.cli.printing import note

if TYPE_CHECKING:
    from atoll.server.audit.actions import Action


def write_down(
    state: Path,
    action: "Action",
    object_: str,
    outcome: str = "ok",
    digests: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Append one signed event by the operating system's user; a coordinator may run at the same time.

    Who may read a model but not write to the directory is told that nothing was written down.
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
        note(f"not written into the audit log: {error}")

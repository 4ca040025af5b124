"""A file of the state directory that shows the current state to commands.

It is neither synced nor part of a backup, and an earlier process's file is removed at the start.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.ground.durable import write_atomically

logger = logging.getLogger(__name__)


class ShownFile:
    """File of one running coordinator, written when its content has changed.

    Args:
        path: the path of the file; None: nothing is shown.
        what: its content, in the line of the log about a failure.
        absent: the content that is represented by no file.
    """

    def __init__(self, path: Path | None, what: str, absent: Any = None) -> None:
        self._path, self._what, self._shown = path, what, absent
        self._has_failed = False
        if path is not None:
            path.unlink(missing_ok=True)

    def show(self, content: Any) -> None:
        """Write JSON values or dataclasses; a failure is logged once in a row, and retried at the next call."""
        if self._path is None or content == self._shown:
            return
        try:
            write_atomically(self._path, json.dumps(content, default=asdict).encode(), is_durable=False)
            self._shown, self._has_failed = content, False
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s cannot be shown to commands: %s", self._what, error)
            self._has_failed = True

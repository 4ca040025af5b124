"""Signals between the launcher of a training and its ranks, as files in a folder of this machine.

    begun         made by the ranks when they look for `stop`: before, the launcher ends them by a signal
    stop          made by the launcher: the ranks save and end
    fault.json    made by the first rank that fails by itself: the reason. It would fail again, so no rank is restarted

A rank also stops when its launcher's process is gone.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER, LAUNCHER = "ATOLL_TRAIN_CONTROL", "ATOLL_TRAIN_LAUNCHER"
"""The environment variables with the folder and with the launcher's process id."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why a rank cannot continue."""

    code: int
    """The exit code of the command."""
    lines: tuple[str, ...]
    """The lines of the message, or of a traceback."""


class Control:
    """The control files of one training.

    Args:
        folder: the folder that launcher and ranks share.
    """

    def __init__(self, folder: Path) -> None:
        self._begun, self._stop, self._fault = folder / "begun", folder / "stop", folder / "fault.json"
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the ranks, with the folder and their launcher, this process."""
        return {FOLDER: str(self.folder), LAUNCHER: str(os.getpid())}

    def begin(self) -> None:
        """Note that the ranks look for a request to stop from now on; called by a rank."""
        if not self._begun.exists():
            self._begun.touch()

    def has_begun(self) -> bool:
        """Return whether the ranks look for a request to stop; until then, they load the task. For the launcher."""
        return self._begun.exists()

    def request_stop(self) -> None:
        """Ask the ranks to save and end; called by the launcher."""
        self._stop.touch()

    def is_stop_requested(self) -> bool:
        """Return whether the launcher has asked the ranks to end; called by a rank."""
        return self._stop.exists()

    def fail(self, fault: Fault) -> None:
        """Record a rank's fault; only the first fault of a training is stored."""
        part = self.folder / f"fault.{os.getpid()}"
        part.write_text(json.dumps(asdict(fault)), "utf-8")
        with suppress(FileExistsError):
            os.link(part, self._fault)

    def fault(self) -> Fault | None:
        """Return the fault of the first rank that failed, if any; called by the launcher."""
        try:
            found = json.loads(self._fault.read_text("utf-8"))
        except FileNotFoundError:
            return None
        return Fault(found["code"], tuple(found["lines"]))


def control_of(environ: Mapping[str, str]) -> Control | None:
    """Return the control files of the `atoll train` that has started this rank; None: another launcher, or none."""
    return Control(Path(environ[FOLDER])) if FOLDER in environ else None


def is_launched() -> bool:
    """Return whether this process is a rank that `atoll train` has started, and that prints for it."""
    return control_of(os.environ) is not None


def stop_requested(control: Control, launcher: int) -> Callable[[], bool]:
    """Return a function that tells a rank to stop: its launcher has asked for it, or is gone."""
    return lambda: control.is_stop_requested() or not _is_alive(launcher)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True

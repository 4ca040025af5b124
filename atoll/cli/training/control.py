"""What the launcher and its ranks tell each other, through a folder of this machine.

    stop          made by the launcher: save, and end
    fault.json    made by the first rank that fails by itself: why; it would fail again, so nobody restarts it

A rank also stops when its launcher is gone.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

INTERRUPTED = 130
"""What the command ends with after a signal."""

FOLDER, LAUNCHER = "ATOLL_TRAIN_CONTROL", "ATOLL_TRAIN_LAUNCHER"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a rank cannot go on."""

    code: int
    """What the command ends with."""
    lines: tuple[str, ...]
    """Of the message, or of a traceback."""


class Control:
    """One folder.

    Args:
        folder: that both sides know.
    """

    def __init__(self, folder: Path) -> None:
        self._stop, self._fault = folder / "stop", folder / "fault.json"
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        """By which the ranks find the folder and their launcher, this process."""
        return {FOLDER: str(self.folder), LAUNCHER: str(os.getpid())}

    def tell_to_stop(self) -> None:
        """As the launcher."""
        self._stop.touch()

    def is_told_to_stop(self) -> bool:
        """As a rank."""
        return self._stop.exists()

    def fail(self, fault: Fault) -> None:
        """As a rank; the first one's fault is kept."""
        part = self.folder / f"fault.{os.getpid()}"
        part.write_text(json.dumps(asdict(fault)), "utf-8")
        with suppress(FileExistsError):
            os.link(part, self._fault)

    def fault(self) -> Fault | None:
        """As the launcher: why a rank has failed, if one has."""
        try:
            found = json.loads(self._fault.read_text("utf-8"))
        except FileNotFoundError:
            return None
        return Fault(found["code"], tuple(found["lines"]))


def control_of(environ: Mapping[str, str]) -> Control | None:
    """That of the launcher which has started this rank; None when it was not ours."""
    return Control(Path(environ[FOLDER])) if FOLDER in environ else None


def is_launched() -> bool:
    """Whether this process is a rank of our own launcher, which speaks for it."""
    return control_of(os.environ) is not None


def stop_requested(control: Control, launcher: int) -> Callable[[], bool]:
    """Whether a rank is told to stop, or has lost its launcher."""
    return lambda: control.is_told_to_stop() or not _is_alive(launcher)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True

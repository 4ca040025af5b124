"""Failures of a simulated run, in its task's code or by a killed process: one line each, and exit code 1."""

import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import atoll
from atoll.cli.faults import RunFailed

_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+)')
_ATOLL = str(Path(atoll.__file__).parent)
_LIBRARIES = (_ATOLL, *sysconfig.get_paths().values(), "<")
"""Beginnings of file names that are not the user's: Atoll, Python, installed packages, generated code."""


@contextmanager
def task_failures_in_one_line() -> Iterator[None]:
    """Turn a failure of the task or of a worker process into one line.

    Raises:
        RunFailed: the task's code failed, in a client's training or elsewhere, or a worker process has ended.
    """
    from atoll.parallel.task.errors import TaskBroken
    from atoll.simulations.engines.engine import ClientFailed
    from atoll.simulations.engines.processes.processes import WorkerDied

    try:
        yield
    except (ClientFailed, TaskBroken, WorkerDied) as error:
        raise RunFailed(one_line(str(error))) from error
    except Exception as error:
        if isinstance(error, OSError) or not _is_of_the_task(error):
            raise
        raise RunFailed(one_line("the task failed:\n" + "".join(traceback.format_exception(error)))) from error


def _is_of_the_task(error: Exception) -> bool:
    """Return whether the user's code is on the stack and the error was not raised in Atoll's."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return not files[-1].startswith(_ATOLL) and any(not file.startswith(_LIBRARIES) for file in files)


def one_line(text: str) -> str:
    """Return a message in one line; a traceback in it shrinks to the exception and the innermost line of user code."""
    message, *rest = text.splitlines() or ["the run has failed"]
    frames = [number for number, line in enumerate(rest) if _FRAME.match(line)]
    if not frames:
        return " ".join([message, *(line.strip() for line in rest)])
    raised = " ".join(line.strip() for line in rest[frames[-1] + 1 :] if not line.startswith("    "))
    return f"{message.removesuffix(':')}: {raised}{_place([rest[number] for number in frames])}"


def _place(frames: list[str]) -> str:
    """Return the innermost frame in user code, as the end of a message; empty: all frames are those of libraries."""
    for frame in reversed(frames):
        found = _FRAME.match(frame)
        if found is not None and not found["file"].startswith(_LIBRARIES):
            return f" ({found['file']}, line {found['line']})"
    return ""

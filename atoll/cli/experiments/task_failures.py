"""What becomes of a simulated run whose task fails, or whose processes are killed: one sentence, and exit code 1."""

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
_NOT_THE_USERS = (_ATOLL, *sysconfig.get_paths().values(), "<")


@contextmanager
def task_failures_in_one_line() -> Iterator[None]:
    """Turn what the task or a dead process did into one sentence.

    Raises:
        RunFailed: the task's own code failed, in a client's training or elsewhere, or a worker has ended.
    """
    from atoll.parallel.task.errors import TaskBroken
    from atoll.simulations.engines.engine import ClientFailed
    from atoll.simulations.engines.processes.processes import WorkerDied

    try:
        yield
    except (ClientFailed, TaskBroken, WorkerDied) as error:
        raise RunFailed(sentence(str(error))) from error
    except Exception as error:
        if isinstance(error, OSError) or not _is_of_the_task(error):
            raise
        raise RunFailed(sentence("the task failed:\n" + "".join(traceback.format_exception(error)))) from error


def _is_of_the_task(error: Exception) -> bool:
    """Whether the user's own code was at work, and it was not Atoll that it had called."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return not files[-1].startswith(_ATOLL) and any(not file.startswith(_NOT_THE_USERS) for file in files)


def sentence(text: str) -> str:
    """Of a text that may end in a traceback: what it says, what was raised, and where in the user's own code."""
    told, *rest = text.splitlines() or ["the run has failed"]
    frames = [number for number, line in enumerate(rest) if _FRAME.match(line)]
    if not frames:
        return " ".join([told, *(line.strip() for line in rest)])
    raised = " ".join(line.strip() for line in rest[frames[-1] + 1 :] if not line.startswith("    "))
    return f"{told.removesuffix(':')}: {raised}{_place([rest[number] for number in frames])}"


def _place(frames: list[str]) -> str:
    """The innermost line of the user's; nothing where all are those of libraries."""
    for frame in reversed(frames):
        found = _FRAME.match(frame)
        if found is not None and not found["file"].startswith(_NOT_THE_USERS):
            return f" ({found['file']}, line {found['line']})"
    return ""

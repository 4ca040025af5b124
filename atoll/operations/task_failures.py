"""Failures of a task's code, with exit code 2, and of a killed process, with exit code 1: one line each."""

import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.operations.faults import CommandError, RunFailed, TaskFailed
from atoll.protocol.signals import Stopped

_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+)')
_FRAME_ANYWHERE = re.compile(r'^  File "([^"]*)", line \d+, in (?!__torch_(?:function|dispatch)__$)', re.MULTILINE)
"""A frame, except one that passes an operation of torch on, where Atoll observes a model or counts its operations."""
_SIGNATURE = re.compile(r"\w\(\) (takes|missing|got an unexpected|got multiple)")
_OF_A_MODEL = ("/torch/nn/", "/torch/autograd/")
"""Parts of the file names of torch's modules and losses, of which alone a task may consist, and of their gradients."""
_ATOLL = str(Path(__file__).parents[1])
_LIBRARIES = (_ATOLL, *sysconfig.get_paths().values(), "<")
"""Beginnings of file names that are not the user's: Atoll, Python, installed packages, generated code."""


def is_of_user(file: str) -> bool:
    """Return whether a file is the user's code."""
    return not file.startswith(_LIBRARIES)


def raised_by_user(error: TaskFailed) -> BaseException | None:
    """Return the exception of the user's code, with its frames from there on; None: it was raised elsewhere."""
    found = error.__cause__
    while found is not None and type(found).__module__.startswith("atoll."):
        found = found.__cause__
    frames = found.__traceback__ if found is not None else None
    while frames is not None and not is_of_user(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return found.with_traceback(frames) if found is not None and frames is not None else None


@contextmanager
def task_failures_in_one_line() -> Iterator[None]:
    """Turn a failure of the task or of a worker process into one line.

    Raises:
        TaskFailed: the task's code failed, in a client's training or elsewhere.
        RunFailed: a worker process has ended.
    """
    from atoll.simulations.engines.engine import ClientFailed
    from atoll.simulations.engines.processes.processes import WorkerDied
    from atoll.task.errors import TaskBroken

    try:
        yield
    except WorkerDied as error:
        raise RunFailed(one_line(str(error))) from error
    except (ClientFailed, TaskBroken) as error:
        raise TaskFailed(one_line(str(error))) from error
    except (Exception, SystemExit) as error:
        if (line := failure_of_the_task(error)) is None:
            raise
        raise TaskFailed(line) from error


def failure_of_the_task(error: Exception | SystemExit) -> str | None:
    """Return an error of the user's code in one line, with its place; None: another's error, or a signal's.

    An OSError outside of the user's file is the machine's: its text says more.
    """
    if isinstance(error, CommandError | Stopped) or not _is_of_the_task(error):
        return None
    return one_line("the task failed:\n" + "".join(traceback.format_exception(error)))


def _is_of_the_task(error: Exception | SystemExit) -> bool:
    """Return whether the error comes from the user's code, from a module of torch, or from a call of the user's code.

    A DataLoader's worker sends its traceback as text, so frames are read from the text. An error that Atoll's code
    raises is none, except for a function of the user's that does not take the arguments of the call.
    """
    files = _FRAME_ANYWHERE.findall("".join(traceback.format_exception(error)))
    if not files:
        return False
    if files[-1].startswith(_ATOLL):
        return isinstance(error, TypeError) and _SIGNATURE.search(str(error)) is not None
    return any(not file.startswith(_LIBRARIES) or any(part in file for part in _OF_A_MODEL) for file in files)


_OWN_ERROR = re.compile(r"^atoll\.[\w.]+: ")
"""The class of an Atoll error before its message, which says all."""


_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
"""The lines of a traceback between an exception and its cause."""


def one_line(text: str) -> str:
    """Return a message in one line; a traceback in it shrinks to the exception and the innermost line of user code.

    An exception without words gives way to its cause.
    """
    message, *rest = text.splitlines() or ["the run has failed"]
    frames = [number for number, line in enumerate(rest) if _FRAME.match(line)]
    if not frames:
        return " ".join([message, *(line.strip() for line in rest)])
    raised = " ".join(line.strip() for line in rest[frames[-1] + 1 :] if not line.startswith("    "))
    raised = _OWN_ERROR.sub("", raised)
    if not raised.partition(":")[2].strip() and (cause := _cause(rest)):
        return one_line("\n".join([message, *cause]))
    return f"{message.removesuffix(':')}: {raised}{_place([rest[number] for number in frames])}"


def _cause(lines: list[str]) -> list[str]:
    """Return the traceback of the exception before the last one; empty: there is none."""
    chained = [number for number, line in enumerate(lines) if line in _CHAINED]
    return lines[: chained[-1]] if chained else []


def _place(frames: list[str]) -> str:
    """Return the innermost frame in user code, as the end of a message; empty: all frames are those of libraries."""
    for frame in reversed(frames):
        found = _FRAME.match(frame)
        if found is not None and is_of_user(found["file"]):
            return f" ({found['file']}, line {found['line']})"
    return ""

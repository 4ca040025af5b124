"""The one exception of the Python interface, with the sentences that the commands print."""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from typing import SupportsIndex


class AtollError(ValueError):
    """A call that is refused or has failed, with the sentences that the command prints.

    Args:
        faults: the mistakes or the causes, a sentence each.
        code: the exit code of the command: 1, a run has failed; 2, a mistake in arguments, settings or task; 75, a disk
            is full, or a disk or a database is away.
    """

    def __init__(self, *faults: str, code: int = 2) -> None:
        super().__init__("\n".join(faults))
        self.faults, self.code = faults, code

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the sentences alone, as a command; of the task's own failure the traceback."""
        if self.__cause__ is not None:
            raise NotImplementedError  # IPython then shows the traceback
        return [f"AtollError: {fault}" for fault in self.faults]


def number_of(version: object) -> int:
    """Return the number of a version.

    Raises:
        AtollError: it is none.
    """
    if isinstance(version, bool) or not isinstance(version, SupportsIndex):
        raise AtollError(f'version: got {version!r}; allowed: a number, "newest", "best"')
    return index(version)


@contextmanager
def one_error(*expected: type[Exception]) -> Iterator[None]:
    """Turn an expected error of the commands, also one of a file, into an `AtollError`.

    Its traceback has no frames of ours but the call's: a failure of the task's code has the user's exception
    as its cause, with the frames from the user's code on.

    Args:
        expected: errors whose text is a sentence of the command.

    Raises:
        AtollError: with the sentences of the command.
    """
    try:
        yield
    except AtollError:
        raise
    except expected as error:
        raise AtollError(*str(error).splitlines()) from None
    except Exception as error:
        from atoll.operations.faults import TaskFailed, code_of, faults_of
        from atoll.operations.task_failures import raised_by_user

        if (faults := faults_of(error)) is None:
            raise
        cause = raised_by_user(error) if isinstance(error, TaskFailed) else None
        raise AtollError(*faults, code=code_of(error)) from cause

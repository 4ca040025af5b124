"""A process that others have begun must not stay when they are gone: whoever kills a simulation kills all of it."""

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait


def end_with_the_parent() -> None:
    """Let this process end when the one that began it (by `multiprocessing`) has ended, however that was."""
    threading.Thread(target=_wait_and_end, name="end-with-the-parent", daemon=True).start()


def _wait_and_end() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])  # our end of a pipe that the parent holds: closed when it is gone
        os._exit(1)

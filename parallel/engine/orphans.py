"""The end of child processes with their parent, so that a command leaves no process behind."""

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait


def end_with_the_parent() -> None:
    """End this process when its parent (in `multiprocessing`) ends for any reason."""
    threading.Thread(target=_wait_and_end, name="end-with-the-parent", daemon=True).start()


def _wait_and_end() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])  # the read end of a pipe whose write end closes with the parent
        os._exit(1)

"""Work on a folder of checkpoints, and death in the middle of it."""

import os
import signal
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from atoll.parallel.checkpoint.store import Store


def publish(store: Store, step: int, content: str = "") -> Path:
    (store.begin(step) / ".metadata").write_text(content, "utf-8")
    store.publish(step, {}, {".metadata": sha256(content.encode()).hexdigest()})
    return store.path(step)


def die_at(folder: Path, number: int, work: Callable[[Path], None]) -> None:
    """Do the work, and be killed when it touches the folder for that time."""
    count = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event.startswith(("open", "os.", "shutil.")) and args and str(folder) in str(args[0]):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    work(folder)


def replace_and_retire(folder: Path) -> None:
    store = Store(folder, keep=1)
    publish(store, 2, "again")
    publish(store, 3, "third")

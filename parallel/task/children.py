"""The way by which child processes find the module of a user's file: a folder of importable notes on `sys.path`.

A file is loaded under a private name, which no folder has. A `DataLoader` with `spawn` or `forkserver` (Python 3.14
starts by it), `multiprocessing` and joblib send classes and functions by the name of their module, and give the child
the parent's `sys.path`. The note of that name loads the file there, under the same name.
"""

import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

NOTE = '''\
"""Loads {path!r} in a child process."""
import importlib.util, sys
sys.path.insert(0, {folder!r})
try:
    _spec = importlib.util.spec_from_file_location(__name__, {path!r})
    sys.modules[__name__] = _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
finally:
    sys.path.remove({folder!r})
    if {folder!r} not in sys.path:
        sys.path.append({folder!r})
'''


def let_children_find(name: str, path: Path) -> None:
    """Make a file importable under a private name in the processes that this one starts.

    Where no folder of our own can be written, nothing happens: only processes that are forked then know the module.
    """
    with suppress(OSError):
        folder = own_folder()
        note = folder / f"{name}.py"
        text = NOTE.format(path=str(path), folder=str(path.parent))
        if not note.exists() or note.read_text("utf-8") != text:
            part = folder / f"{name}.{os.getpid()}.part"
            part.write_text(text, "utf-8")
            part.replace(note)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def own_folder() -> Path:
    """Return the folder of the notes, which this user alone can write.

    It is one for all processes of a user, because a worker that is killed removes nothing.

    Raises:
        OSError: it cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / f"atoll-tasks-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="atoll-tasks-"))  # another user was here first

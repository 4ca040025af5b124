"""The random id of a state directory, which a restart keeps.

folder_id    in the directory: 32 hexadecimal digits
"""

import re
import secrets
from pathlib import Path

from atoll.ground.durable import write_atomically

FILE = "folder_id"


def folder_id(folder: Path) -> str:
    """Return the id of a directory that this process has locked; the first call makes it.

    Raises:
        DiskFull, OSError: it cannot be read, or not be written.
    """
    path = folder / FILE
    try:
        found = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        found = ""
    if re.fullmatch("[0-9a-f]{32}", found) is None:  # absent or damaged: a new id serves as well
        found = secrets.token_hex(16)
        write_atomically(path, found.encode())
    return found

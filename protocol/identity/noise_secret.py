"""The secret of a state directory from which its noise is drawn (`aggregation/noise`): never sent, never logged.

noise.key    in the directory, mode 0600: 64 hexadecimal digits, from the operating system
"""

import re
import secrets
from pathlib import Path

from atoll.aggregation.noise.key import BYTES
from atoll.protocol.identity.credential import write_private

FILE = "noise.key"


def noise_secret(folder: Path) -> bytes:
    """Return the secret of a directory that this process has locked, 32 bytes; the first call makes it.

    Raises:
        OSError: it cannot be read or written, or is damaged: another one would draw other noise for the same work.
    """
    path = folder / FILE
    try:
        found = path.read_text("ascii", errors="replace").strip()
    except FileNotFoundError:
        found = secrets.token_hex(BYTES)
        write_private(path, f"{found}\n".encode())
    if re.fullmatch(f"[0-9a-f]{{{2 * BYTES}}}", found) is None:
        way_out = "put it back from a backup, or delete it: a new one draws other noise, also for work that is repeated"
        raise OSError(f"{path} is damaged: {way_out}")
    return bytes.fromhex(found)

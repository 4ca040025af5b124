"""The secret of a state directory from which its noise is drawn (`ground/noise`): never sent, never logged.

noise.key    in the directory, mode 0600: 64 hexadecimal digits, from the operating system
"""

import re
import secrets
from pathlib import Path

from atoll.ground.durable import write_private
from atoll.ground.noise.key import BYTES, key_of

FILE = "noise.key"


def noise_secret(folder: Path) -> bytes:
    """Return the secret of a directory locked by this process, 32 bytes; the first call makes it.

    Raises:
        OSError: the secret is unreadable, unwritable or damaged: a new one would draw other noise for the same work.
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


def run_number(folder: Path, run_id: str) -> int:
    """Return the public number of a coordinator's run, from 1 to 2^63 - 1, for apps that identify a run by a number.

    It is a function of the coordinator's secret and of the run's name, which no later run gets: the same after a
    restart, different in each directory. Raises the errors of `noise_secret`.
    """
    return int.from_bytes(key_of(noise_secret(folder), "run number", run_id)[:8]) >> 1 or 1

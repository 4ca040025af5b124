"""The secret of a private training from which its samples and noise are drawn, beside its account until it ends.

privacy.key    mode 0600: 64 hexadecimal digits, from the operating system; no longer there once the training has ended

With it a continued training draws what the interrupted one would have drawn, on any mesh. What was drawn for steps that
were charged is never drawn again: the account counts how often such steps are done again (`Account.repeats`), and the
count is part of the key. A copy of the folder has the secret, too, so only one of both may be continued.
"""

import re
import secrets
from pathlib import Path

from atoll.ground.durable import naming_full_disk, write_private
from atoll.ground.noise.key import BYTES

FILE = "privacy.key"


class SecretBroken(ValueError):
    """The secret cannot be read; another one is as good, if the operator removes the file."""


def secret_of(folder: Path) -> bytes:
    """Return the secret of a training's folder, 32 bytes; the first call makes it.

    Raises:
        SecretBroken: the file is damaged or unreadable.
        OSError: it cannot be written.
    """
    path = folder / FILE
    try:
        found = path.read_text("ascii", errors="replace").strip()
    except FileNotFoundError:
        return _new(path)
    except OSError as error:
        raise SecretBroken(f"{path} cannot be read ({error.strerror}): {_WAY_OUT}") from error
    if re.fullmatch(f"[0-9a-f]{{{2 * BYTES}}}", found) is None:
        raise SecretBroken(f"{path} is damaged: {_WAY_OUT}")
    return bytes.fromhex(found)


def forget(folder: Path) -> None:
    """Delete the secret of a training that has ended."""
    (folder / FILE).unlink(missing_ok=True)


_WAY_OUT = "delete it, and the training continues with other samples and noise"


def _new(path: Path) -> bytes:
    found = secrets.token_bytes(BYTES)
    with naming_full_disk(path):
        write_private(path, f"{found.hex()}\n".encode())
    return found

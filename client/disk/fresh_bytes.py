"""Fresh bytes of the noise of each training, from the operating system: `fresh/` in the agent's state directory.

    RUN.ROUND    {"content": SHA-256 of the work, "bytes": 64 hexadecimal digits}, mode 0600

They are durable before the first step, so that a training that is repeated after a kill has the same samples and noise;
and they are gone, durably, before the first byte of its update leaves. Work that is asked for once more has others: the
difference of both updates has the noise of both, whatever happened to the rows in between. With other content, after a
newer round of its run, or where a file is damaged or was not put back from a backup, the bytes are others, too.
"""

import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from atoll.client.disk.spool import plain_name
from atoll.ground.durable import naming_full_disk, write_private
from atoll.ground.folders import sync_folder
from atoll.ground.noise.key import BYTES, key_of
from atoll.ground.process import crash_points
from atoll.protocol.vocabulary import RoundId, RunId

FOLDER = "fresh"


class FreshBytes:
    """Store of the fresh bytes of one agent; it has no state in memory.

    Args:
        state: the agent's state directory.
    """

    def __init__(self, state: Path) -> None:
        self._folder = state / FOLDER

    def made(self, run_id: RunId, round_id: RoundId, content: str) -> bytes:
        """Return the bytes of some work, 32 of them, durable on return; those of earlier rounds of its run are deleted.

        Raises:
            OSError: they cannot be read or written.
        """
        if (known := self._find(run_id, round_id, content)) is not None:
            return known
        if not self._folder.is_dir():
            self._folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self._folder.parent)
        for earlier in [path for path, number in self._of(run_id) if number < round_id]:
            earlier.unlink(missing_ok=True)
        found, path = secrets.token_bytes(BYTES), self._path(run_id, round_id)
        with naming_full_disk(path):
            write_private(path, json.dumps({"content": content, "bytes": found.hex()}).encode())
            sync_folder(self._folder)
        crash_points.reached("agent.noise_kept")
        return found

    def name_of(self, run_id: RunId, round_id: RoundId, content: str) -> str:
        """Return the name of the bytes of some work, which tells nothing of them; empty: there are none."""
        known = self._find(run_id, round_id, content)
        return "" if known is None else name_of(known)

    def forget(self, run_id: RunId, round_id: RoundId) -> None:
        """Delete the bytes of a round; it is durable on return, also if an earlier call was killed or has failed.

        Raises:
            OSError: they cannot be deleted.
        """
        self._path(run_id, round_id).unlink(missing_ok=True)
        if self._folder.is_dir():
            sync_folder(self._folder)
        crash_points.reached("agent.noise_forgotten")

    def forget_run(self, run_id: RunId) -> None:
        """Delete the bytes of a run that has ended. Raises OSError: they cannot be deleted."""
        for path, _ in [*self._of(run_id)]:
            path.unlink(missing_ok=True)

    def _find(self, run_id: RunId, round_id: RoundId, content: str) -> bytes | None:
        """Return the bytes of some work; None: there are none, or a damaged file."""
        try:
            document = json.loads(self._path(run_id, round_id).read_bytes())
            if document["content"] == content and re.fullmatch(f"[0-9a-f]{{{2 * BYTES}}}", document["bytes"]):
                return bytes.fromhex(document["bytes"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass
        return None

    def _of(self, run_id: RunId) -> Iterator[tuple[Path, int]]:
        """Yield the files of a run, with the numbers of their rounds."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                name, _, number = path.name.rpartition(".")
                if name == plain_name(run_id) and number.isdecimal():
                    yield path, int(number)

    def _path(self, run_id: RunId, round_id: RoundId) -> Path:
        return self._folder / f"{plain_name(run_id)}.{round_id}"


def name_of(fresh: bytes) -> str:
    """Return the name of fresh bytes: equal names have equal noise, and a name tells nothing of the bytes."""
    return key_of(fresh, "name of the fresh bytes").hex()[:32]

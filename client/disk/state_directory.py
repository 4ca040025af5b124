"""The agent's own directory, locked for as long as the process lives.

lock          held by flock; says the process id of its owner
spool/        finished updates that the coordinator has not answered for (spool)
models/       versions of the global model (models)
kept/         what one update leaves for the next (kept)
personal/     what this site keeps for itself between the rounds of a run (personal)
identity/     who it is: its key and its certificate (protocol.identity.credential)
seen          the newest of each run that the coordinator has shown (memory)
work/         what the worker is writing; emptied when an agent starts
policy.db     what the site's policy remembers: runs that have asked, rounds that were begun (policy/history)
decisions/    what the policy decided, a line each (policy/decisions)
worker.*.log  what the user's code prints, one for each task
"""

import fcntl
import os
from pathlib import Path

from atoll.protocol.settings import ConfigError

OF_SERVERS = "state.db", "database.json", "rank.json"
"""What lies in the directories of coordinators and of aggregation ranks."""


class StateDirectory:
    """Opens and locks the directory; `close`, or the end of the process, however it comes, lets it go.

    Raises:
        ConfigError: another agent uses it, it is a coordinator's or a rank's, or it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spool, self.models, self.work = path / "spool", path / "models", path / "work"
        self.kept, self.personal, self.seen = path / "kept", path / "personal", path / "seen"
        self.identity = path / "identity"
        _refuse_a_server_s(path)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # one that is there keeps its mode
            for folder in (self.spool, self.models, self.work, self.kept, self.personal):
                folder.mkdir(exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError([f"state: {path} cannot be used: {error.strerror or error}"]) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ConfigError(
                [f"state: {path} is in use by another agent (process {owner}); each agent needs a directory of its own"]
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        for leftover in self.work.iterdir():
            leftover.unlink()

    def worker_log(self, task: str) -> Path:
        """Where the worker of a task writes what the user's code prints."""
        name = "".join(letter if letter.isalnum() or letter in "-_" else "." for letter in task)[:100]
        return self.path / f"worker.{name}.log"

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _refuse_a_server_s(path: Path) -> None:
    """Before anything is made in it: the agent's folders would stay among what somebody else keeps there."""
    if found := [name for name in OF_SERVERS if os.path.lexists(path / name)]:
        raise ConfigError(
            [f"state: {path} is a coordinator's or an aggregation rank's, for it holds {found[0]}: name another"]
        )

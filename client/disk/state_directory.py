"""The agent's state directory, locked by its process.

lock          lock file (flock) with the process id of its owner
spool/        finished updates that the coordinator has not answered (`spool`)
encoded/      updates encoded for secure sums, which are never sent as they are
models/       versions of the global model (`model_cache`)
kept/         residuals of error feedback that one update leaves for the next (`residual_store`)
personal/     client state that stays at the site between the rounds of a run (`client_state`)
folder_id     random id, which a restart keeps (`ground/folder_id`)
noise.key     secret of the noise that this site draws (`protocol/identity/noise_secret`)
fresh/        fresh bytes of the noise of each training, until its update leaves (`fresh_bytes`)
identity/     credential: the agent's key and certificate (`protocol/identity/credential`)
seen          newest round and version of each run that the coordinator has shown (`seen_store`)
work/         output files of the worker; emptied when an agent starts
crew/         shared by an agent and its ranks: address of their socket, checkpoint within a round (`mesh_client`)
policy.db     history for the site's policy: runs that have asked, rounds that have begun (`policy/history`), budgets
budgets.json  end of the ledger of budgets as this agent last saw it (`policy/budgets/anchor`)
decisions/    log of the policy's decisions (`policy/decisions`)
worker.*.log  output of the user's code, one file for each task; with a mesh, one more for each rank
"""

import os
from pathlib import Path

from atoll.ground.durable import remove
from atoll.ground.file_lock import Locked, lock_file
from atoll.ground.folder_id import folder_id
from atoll.protocol.identity.noise_secret import noise_secret
from atoll.protocol.settings import ConfigError

SERVER_FILES = "state.db", "database.json", "rank.json"
"""Files in the state directories of coordinators and of aggregation ranks."""


def holder_of(path: Path) -> int | None:
    """Return the living process that the lock file of an agent's state directory names; None: none. Takes no lock."""
    try:
        pid = (path / "lock").read_text("ascii").strip()
        os.kill(int(pid), 0)
    except PermissionError:  # of another user
        return int(pid) if pid.isdecimal() else None
    except (OSError, ValueError, OverflowError):
        return None
    return int(pid)


class StateDirectory:
    """The directory, open and locked until `close` or the end of the process, however it ends.

    Raises:
        ConfigError: another agent uses it, it belongs to a coordinator or an aggregation rank, or it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spool, self.models, self.work = path / "spool", path / "models", path / "work"
        self.encoded = path / "encoded"
        self.residuals, self.client_state, self.seen = path / "kept", path / "personal", path / "seen"
        self.identity, self.crew = path / "identity", path / "crew"
        _refuse_server_directory(path)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # an existing directory keeps its mode
            for folder in (self.spool, self.encoded, self.models, self.work, self.residuals, self.client_state):
                folder.mkdir(exist_ok=True)
            self._lock = lock_file(path / "lock", f"{os.getpid()}\n")
            self.folder_id = folder_id(path)
            self.noise_secret = noise_secret(path)
        except Locked as error:
            owner = error.owner or "unknown"
            raise ConfigError(
                [f"state: {path} is in use by another agent (process {owner}); each agent needs a separate directory"]
            ) from None
        except OSError as error:
            raise ConfigError([f"state: {path} cannot be used: {error.strerror or error}"]) from error
        for leftover in self.work.iterdir():
            remove(leftover)

    def worker_log(self, task: str) -> Path:
        """Return the path of the log with the output of a task's code."""
        name = "".join(letter if letter.isalnum() or letter in "-_" else "." for letter in task)[:100]
        return self.path / f"worker.{name}.log"

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _refuse_server_directory(path: Path) -> None:
    """Refuse the state directory of a server before creating anything in it: the agent's folders would stay there."""
    if found := [name for name in SERVER_FILES if os.path.lexists(path / name)]:
        raise ConfigError(
            [f"state: {path} is a coordinator's or an aggregation rank's, for it holds {found[0]}: name another"]
        )

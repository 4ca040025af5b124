"""The places that have runs: a coordinator, near or far, the agent of a site, and a folder of simulations."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.interface.agents import Agent
from atoll.interface.arguments import folder_of
from atoll.interface.deployed import Federation, connect, in_database
from atoll.interface.errors import AtollError, one_error
from atoll.interface.simulated import SimulatedRun
from atoll.operations.place import STATE, credential_folder, is_elsewhere

if TYPE_CHECKING:
    from atoll.server.identity.readers import StoredReaders

DEPTH = 2
"""The levels below a folder at which simulations are looked for."""

FOLDERS_MAX = 10_000
"""The largest number of folders in which simulations are looked for."""

ROUNDS = "rounds.jsonl"
"""The file that a folder of a simulated run has."""


class Simulations:
    """The simulated runs in a folder and at most two levels below it, sweeps' included.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder_of("folder", folder)

    @property
    def names(self) -> list[str]:
        """The runs by their folders, relative to this one, in the order of their names; `.`: this one."""
        return sorted(self._found(self.folder, "", DEPTH))

    def run(self, name: str) -> SimulatedRun:
        """Return a run by the name that `names` has.

        Raises:
            AtollError: there is no such run.
        """
        parts = Path(name).parts
        if name != "." and (len(parts) > DEPTH or ".." in parts or Path(name).is_absolute()):
            raise AtollError(f"run: got {name!r}; allowed: a folder at most {DEPTH} levels below {self.folder}")
        if not os.path.isfile(self.folder / name / ROUNDS):  # also of a name that no file can have
            raise AtollError(f"{self.folder} has no simulated run {name!r}: there is no {ROUNDS} in that folder")
        return SimulatedRun(self.folder / name)

    def _found(self, folder: Path, name: str, depth: int) -> Iterator[str]:
        """Yield the names of the runs in a folder and below it; a run's own folders are not looked into."""
        if (folder / ROUNDS).is_file():
            yield name or "."
            return
        if not depth:
            return
        try:
            with os.scandir(folder) as entries:
                some = islice(entries, FOLDERS_MAX)
                inner = [one.name for one in some if _is_text(one.name) and one.is_dir(follow_symlinks=False)]
        except OSError:
            return  # of another user: it shows nothing
        for each in inner:
            yield from self._found(folder / each, f"{name}/{each}" if name else each, depth - 1)

    def __repr__(self) -> str:
        return f"Simulations({str(self.folder)!r})"


def _is_text(name: str) -> bool:
    """Return whether UTF-8 can encode a name: no page and no address can have another one."""
    return not any("\udc80" <= letter <= "\udcff" for letter in name)


Place = Federation | Simulations | Agent


@one_error()
def place(where: str) -> Place:
    """Return what a place has: a coordinator, near or far, or in a database; an agent of a site; or simulations.

    Args:
        where: the state directory or folder, `HOST:PORT` of a coordinator that this person has joined, or the URL of a
            PostgreSQL database.

    Raises:
        AtollError: it is none of these; the message says what it lacks.
    """
    from atoll.protocol.identity.join_code import is_address

    if "://" in where:
        return in_database(where)
    folder = folder_of("place", where)
    if not folder.is_dir():
        if is_address(where):
            return connect(where)
        raise AtollError(f"{where}: there is no such folder; {_ALLOWED}")
    if (folder / "policy.db").is_file():
        return Agent(folder)
    if (folder / "state.db").is_file() or (folder / "database.json").is_file():
        return connect(folder)
    found = Simulations(folder)
    if not found.names:
        raise AtollError(f"{where}: has neither a coordinator's state nor a simulated run; {_ALLOWED}")
    return found


_ALLOWED = (
    "allowed: a coordinator's state directory, HOST:PORT of one that you have joined, postgresql://USER@HOST/DATABASE, "
    "an agent's state directory, or a folder with simulations"
)


def label_of(where: str) -> str:
    """Return the text that names a place on a page: of a URL without its password."""
    from atoll.protocol.secrets import without_password

    return without_password(where)


@one_error()
def places_here() -> list[str]:
    """Return the places of the current folder: the coordinator here or joined, the agents, and the simulations.

    Raises:
        AtollError: the address of the joined coordinator cannot be read.
    """
    found = [str(STATE)] if STATE.is_dir() else [_joined_address()] if is_elsewhere(STATE) else []
    found += sorted(str(path.parent) for path in Path().glob("atoll-agent*/policy.db"))
    return [*found, *(["."] if Simulations(".").names else [])]


def _joined_address() -> str:
    from atoll.protocol.identity.enrolling import Place

    return Place.load(credential_folder()).admin_address


@one_error()
def readers_of(state: Path | str) -> "StoredReaders":
    """Return the check of who may read on other interfaces than loopback, by the members of a coordinator.

    Args:
        state: the coordinator's state directory, on this machine.

    Raises:
        AtollError: the directory has no certificate of its coordinator, or this user may not read its key.
    """
    from atoll.server.identity.readers import StoredReaders

    return StoredReaders(folder_of("state", state))

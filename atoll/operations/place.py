"""The coordinator that a command calls: of a state directory here, the joined one, or one that a program names."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from atoll.operations.faults import CommandError
from atoll.protocol.identity.names import PLACE

STATE = Path("atoll-state")
"""The default state directory of a coordinator, as in `coordinator.state`."""

IDENTITY_VARIABLE = "ATOLL_IDENTITY"
"""The environment variable that names the folder of a person's credential."""


@dataclass(frozen=True, slots=True)
class Named:
    """A coordinator that a program names.

    Args:
        folder: the folder of the credential; None: this person's.
        address: the coordinator's address; empty: the one that is stored beside the credential.
    """

    folder: Path | None = None
    address: str = ""


HERE = Named()
"""The coordinator of a state directory on this machine, also after the directory has gone."""

_named: ContextVar[Named | None] = ContextVar("named", default=None)


@contextmanager
def asking(named: Named | None) -> Iterator[None]:
    """Direct all calls in the block to the named coordinator, whatever state directory exists; None: as a command."""
    token = _named.set(named)
    try:
        yield
    finally:
        _named.reset(token)


_user: ContextVar[str] = ContextVar("user", default="")


@contextmanager
def acting_for(user: str) -> Iterator[None]:
    """Name the user for whom all changes in the block are made, for the audit log; empty: the caller itself."""
    token = _user.set(user)
    try:
        yield
    finally:
        _user.reset(token)


def user_here() -> str:
    """Return the user for whom a change is made; empty: the caller itself."""
    return _user.get()


def named_here() -> Named | None:
    """Return the coordinator elsewhere that a program has named; None: it has named none."""
    named = _named.get()
    return None if named is HERE else named


def credential_folder() -> Path:
    """Return the folder of the credential: the named one, or this person's."""
    named = named_here()
    return identity_folder() if named is None or named.folder is None else named.folder


def is_elsewhere(state: Path) -> bool:
    """Return whether a command calls a joined coordinator: a program names one, or `state` does not exist here."""
    if named_here() is not None:
        return True
    if _named.get() is HERE or state.exists():
        return False
    try:
        return (credential_folder() / PLACE).exists()
    except CommandError:  # without a home directory, nobody has joined from here
        return False


def identity_folder() -> Path:
    """Return the folder of this person's credential, on a machine without a coordinator.

    Raises:
        CommandError: the user has no home directory, as a uid without an entry in passwd, and names no folder.
    """
    if folder := os.environ.get(IDENTITY_VARIABLE):
        return Path(folder)
    try:
        return Path.home() / ".config" / "atoll" / "identity"
    except RuntimeError as error:
        raise CommandError(
            f"uid {os.getuid()} has no home directory: set {IDENTITY_VARIABLE}=DIR to the folder of your certificate, "
            "or HOME"
        ) from error

"""The coordinator that a command goes to: the one of a state directory here, the joined one, or one that is named."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from atoll.cli.faults import CommandError
from atoll.cli.options import identity_folder
from atoll.protocol.identity.names import PLACE


@dataclass(frozen=True, slots=True)
class Named:
    """A coordinator that a program names.

    Args:
        folder: the folder of the credential; None: this person's.
        address: the coordinator's address; empty: the one that is stored beside the credential.
    """

    folder: Path | None = None
    address: str = ""


_named: ContextVar[Named | None] = ContextVar("named", default=None)


@contextmanager
def asking(named: Named | None) -> Iterator[None]:
    """Ask the named coordinator in this block, whatever state directory there is; None: as a command does."""
    token = _named.set(named)
    try:
        yield
    finally:
        _named.reset(token)


def named_here() -> Named | None:
    """Return the coordinator that a program has named; None: it has named none."""
    return _named.get()


def is_named() -> bool:
    """Return whether a program has named the coordinator to ask."""
    return _named.get() is not None


def credential_folder() -> Path:
    """Return the folder of the credential: the named one, or this person's."""
    named = _named.get()
    return identity_folder() if named is None or named.folder is None else named.folder


def is_elsewhere(state: Path) -> bool:
    """Return whether a command goes to a joined coordinator: a program names it, or there is no such directory here."""
    if is_named():
        return True
    if state.exists():
        return False
    try:
        return (credential_folder() / PLACE).exists()
    except CommandError:  # without a home directory, nobody has joined from here
        return False

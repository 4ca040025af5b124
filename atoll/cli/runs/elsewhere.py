"""The question which coordinator a command goes to: the one of a state directory here, or the joined one."""

from pathlib import Path

from atoll.cli.faults import CommandError
from atoll.cli.options import identity_folder
from atoll.protocol.identity.names import PLACE


def is_elsewhere(state: Path) -> bool:
    """Return whether a command goes to a joined coordinator: there is one, and no such directory here."""
    if state.exists():
        return False
    try:
        return (identity_folder() / PLACE).exists()
    except CommandError:  # without a home directory, nobody has joined from here
        return False

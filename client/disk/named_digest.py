"""Files that have the SHA-256 of their content in their names: `NAME.SHA-256.SUFFIX`, compared before each use."""

from pathlib import Path

from atoll.ground.file_digest import sha256_of_file


class StateDamaged(OSError):
    """A file of the agent's state has other bytes than were written; the message names it, and the way out."""


def check_named(path: Path) -> Path:
    """Return the path of a file whose content is that of the SHA-256 in its name.

    Raises:
        StateDamaged: its bytes are others.
    """
    if sha256_of_file(path) != path.stem.rpartition(".")[2]:
        raise StateDamaged(
            f"{path} is damaged, for its bytes are not those of the SHA-256 in its name: put the file of a backup "
            "back, or delete it, and go on as without it"
        )
    return path

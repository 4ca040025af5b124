"""Files with the SHA-256 of their content in their names: `NAME.SHA-256.SUFFIX`, checked before each use."""

from pathlib import Path

from atoll.ground.file_digest import sha256_of_file


class StateDamaged(OSError):
    """Error: a file of the agent's state has changed; the message names the file and the remedy."""


def check_named(path: Path) -> Path:
    """Return the path of a file after checking its content against the SHA-256 in its name.

    Raises:
        StateDamaged: they differ.
    """
    if sha256_of_file(path) != path.stem.rpartition(".")[2]:
        raise StateDamaged(
            f"{path} is damaged: its content does not match the SHA-256 in its name; put the file of a backup "
            "back, or delete it to continue without it"
        )
    return path

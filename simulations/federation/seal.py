"""The seal of a finished run: `SHA256SUMS`, the digests of the files of its folder that others read.

`sha256sum -c SHA256SUMS` checks them, too. A folder without it belongs to an unfinished run, or to an earlier program.
"""

from collections.abc import Collection
from pathlib import Path

from atoll.ground.durable import write_atomically
from atoll.ground.file_digest import SUMS, faults_of_files, read_sums, sha256_of_file, sums_text


def seal(folder: Path, names: Collection[str]) -> None:
    """Write the digests of the files that exist."""
    digests = {name: sha256_of_file(folder / name) for name in names if (folder / name).exists()}
    write_atomically(folder / SUMS, sums_text(digests).encode())


def unseal(folder: Path) -> None:
    """Remove the digests, before a file is changed."""
    (folder / SUMS).unlink(missing_ok=True)


def faults_of_seal(folder: Path) -> list[str]:
    """Return the faults of the files in a folder, by their names; empty: unchanged since the seal, or unsealed."""
    try:
        digests = read_sums(folder)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        return [f"{folder / SUMS} is damaged: {error}"]
    if not digests:
        return [f"{folder / SUMS} is damaged: it lists no file"]
    return [f"{fault} (by {SUMS})" for fault in faults_of_files(folder, digests)]

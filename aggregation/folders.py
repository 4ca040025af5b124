"""Durability of names: the entries of a folder on disk."""

import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable (fsync)."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

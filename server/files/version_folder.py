"""The folder of a run's versions, for reading: nothing is created, and no numpy is imported."""

import os
import re
from pathlib import Path

from atoll.protocol.vocabulary import Version

_MANIFEST = re.compile(r"(\d{6,})\.manifest\.json")


class VersionFolder:
    """Files of a run's versions, laid out as in `run_store`.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._versions = folder / "versions"

    def version_path(self, version: Version, slot: str = "") -> Path:
        """Return the path of a version's tensors, or of a slot of the server optimizer beside it."""
        return self._versions / f"{_stem(version, slot)}.safetensors"

    def manifest_path(self, version: Version, slot: str = "") -> Path:
        """Return the path of the manifest of `version_path`."""
        return self._versions / f"{_stem(version, slot)}.manifest.json"

    def read_manifest(self, version: Version, slot: str = "") -> bytes:
        """Return the bytes of a manifest.

        Raises:
            FileNotFoundError: the version was never made, or was deleted.
        """
        return self.manifest_path(version, slot).read_bytes()

    def versions(self) -> list[Version]:
        """Return the versions on disk, oldest first; empty without a folder of versions."""
        try:
            names = os.listdir(self._versions)
        except FileNotFoundError:
            return []
        found = map(_MANIFEST.fullmatch, names)
        return sorted(Version(int(name[1])) for name in found if name)


def _stem(version: Version, slot: str) -> str:
    return f"{version:06d}.{slot}" if slot else f"{version:06d}"

"""The coordinator's notes about an update's parts, whose bytes are at aggregation ranks, until it decides.

    incoming/<digest>.0003.json    the manifest of part 3 and, once it is kept, its findings

The notes are files because manifests of many parts are large. They need not survive: after a restart the client opens
every part again.
"""

from collections.abc import Iterator
from pathlib import Path

from atoll.ground.durable import write_atomically
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.vocabulary import Digest
from atoll.server.files.part_files import file_stem, read_findings
from atoll.server.journal.codec import StoredUpdateMeta, encode_meta
from atoll.tensors.updates.inspection import Merged


class PartNotes:
    """Notes about one update.

    Args:
        folder: the folder of the notes.
        root: the update's manifest.
        digest: the update's digest.
    """

    def __init__(self, folder: Path, root: UpdateManifest, digest: Digest) -> None:
        self._folder, self._root, self._digest = folder, root, digest

    def _path(self, index: int) -> Path:
        return self._folder / f"{file_stem(self._digest, index)}.json"

    def note(self, index: int, findings: StoredUpdateMeta) -> None:
        """Write a part's manifest, with the findings about its bytes if they are kept.

        Raises:
            DiskFull: the disk is full; try again.
        """
        write_atomically(self._path(index), encode_meta(findings).encode(), is_durable=False)

    def _read(self) -> Iterator[tuple[PartManifest, StoredUpdateMeta]]:
        return (read_findings(self._path(index), listed) for index, listed in enumerate(self._root.parts))

    def manifests(self) -> Iterator[PartManifest]:
        """Yield the manifests of all parts, each read on demand.

        Raises:
            StoreCorrupted: a note is missing or damaged.
        """
        return (part for part, _ in self._read())

    def whole(self, ranks: tuple[int, ...]) -> StoredUpdateMeta:
        """Return the metadata of the complete update, with the findings of all parts together.

        Args:
            ranks: the rank of each part, in order.

        Raises:
            StoreCorrupted: see `manifests`.
        """
        found = Merged()
        for _, findings in self._read():
            found.add(findings.magnitudes, findings.squared_norms)
        spread = ranks if len(set(ranks)) > 1 else ()
        return StoredUpdateMeta(self._root.encode(), found.magnitudes, found.squared_norms, ranks[0], spread)

    def discard(self) -> None:
        """Delete the notes."""
        for index in range(len(self._root.parts)):
            self._path(index).unlink(missing_ok=True)

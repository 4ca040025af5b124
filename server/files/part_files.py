"""The parts of an update on disk, before and after it is accepted.

    incoming/<digest>.0003.bin     the bytes of part 3 so far
    incoming/<digest>.0003.json    its manifest and what was found in it: then the part is kept, and durable
    updates/<digest>.0003.*        the same, of a complete update

The digest is the update's, from the root manifest: two clients' equal parts are two files. The findings are stored
beside the bytes, like a version's manifest, and not in the journal, whose row has the root and the findings of all
parts together.

At an aggregation rank each part moves to `updates/` individually, before the coordinator is told: from then on it is
deleted only with the coordinator's consent (`FindUnused`).
"""

from collections.abc import Collection, Iterator
from pathlib import Path

from atoll.ground.durable import move_into, write_atomically
from atoll.ground.folders import sync_folder
from atoll.ground.printable import count_of
from atoll.ground.strict_json import ManifestError
from atoll.protocol.manifest import Part, UpdateManifest, digest_of
from atoll.protocol.part_manifest import PartManifest, parse_part
from atoll.protocol.vocabulary import Digest
from atoll.server.errors import StoreCorrupted
from atoll.server.files.incoming import Incoming
from atoll.server.journal.codec import StoredUpdateMeta, decode_meta, encode_meta
from atoll.tensors.updates.inspection import Inspection, Merged


def file_stem(digest: Digest, part: int | None = None) -> str:
    """Return the name of an update's file, or of a part's, without its suffix."""
    return digest if part is None else f"{digest}.{part:04d}"


class PartFiles:
    """Files of one update's parts.

    Args:
        incoming: the folder of uploads in progress.
        updates: the folder of complete updates.
        root: the update's manifest.
        digest: the update's digest.
    """

    def __init__(self, incoming: Path, updates: Path, root: UpdateManifest, digest: Digest) -> None:
        self._incoming, self._updates, self._root, self._digest = incoming, updates, root, digest

    @property
    def _all(self) -> range:
        return range(len(self._root.parts))

    def kept(self) -> set[int]:
        """Return the durable parts; a part is synced before its findings are written."""
        return {index for index in self._all if self._folder_of(index) is not None}

    def _folder_of(self, index: int) -> Path | None:
        for folder in (self._updates, self._incoming):
            data, findings = self.paths(folder, index)
            if findings.is_file() and data.is_file() and data.stat().st_size == self._root.parts[index].num_bytes:
                return folder
        return None

    def paths(self, folder: Path, index: int) -> tuple[Path, Path]:
        """Return the paths of a part's bytes and of its findings in a folder."""
        stem = file_stem(self._digest, index)
        return folder / f"{stem}.bin", folder / f"{stem}.json"

    def keep(self, upload: Incoming, part: PartManifest, inspection: Inspection) -> None:
        """Make a complete, sound part durable; its findings are written last.

        Raises:
            DiskFull: the disk is full; try again.
        """
        upload.sync()
        findings = StoredUpdateMeta(part.encode(), inspection.magnitudes, inspection.squared_norms)
        write_atomically(self.paths(self._incoming, part.index)[1], encode_meta(findings).encode())

    def discard(self) -> None:
        """Delete every part, findings before the bytes that they describe."""
        for folder in (self._incoming, self._updates):
            for index in self._all:
                for path in reversed(self.paths(folder, index)):
                    path.unlink(missing_ok=True)

    def manifests(self, indices: Collection[int]) -> Iterator[PartManifest]:
        """Yield the manifests of some kept parts, each read on demand.

        Raises:
            StoreCorrupted: one is missing, or the root does not list it.
        """
        return (part for part, _ in self._read(indices))

    def pieces(self, indices: Collection[int] | None = None) -> list[tuple[Path, PartManifest]]:
        """Return the file and the manifest of parts of a complete update, by default of all.

        Raises:
            StoreCorrupted: one is missing or of another size, or the root lists another manifest.
        """
        read = self._all if indices is None else indices
        return [(self.paths(self._updates, part.index)[0], part) for part, _ in self._read(read, self._updates)]

    def make_whole(self) -> StoredUpdateMeta:
        """Move the kept parts to the complete updates, durably, and return the findings of all of them together."""
        found = Merged()
        for _, findings in self._read(self._all):
            found.add(findings.magnitudes, findings.squared_norms)
        for index in self._all:
            self._move(index)
        sync_folder(self._updates)
        return StoredUpdateMeta(self._root.encode(), found.magnitudes, found.squared_norms)

    def settle(self, index: int) -> bool:
        """Move a kept part to the complete updates, durably, regardless of the others; return whether it is kept."""
        if self._folder_of(index) is None:
            return False
        if self._move(index):
            sync_folder(self._updates)
        return True

    def _move(self, index: int) -> bool:
        """Move a kept part. A crash in between leaves bytes without findings in `incoming/`: they are checked again."""
        if self._folder_of(index) != self._incoming:
            return False
        sources, targets = (self.paths(folder, index) for folder in (self._incoming, self._updates))
        for source, target in zip(reversed(sources), reversed(targets), strict=True):
            move_into(source, target)
        return True

    def findings(self, index: int) -> StoredUpdateMeta:
        """Return a kept part's manifest and its findings.

        Raises:
            StoreCorrupted: see `manifests`.
        """
        [(_, findings)] = self._read([index])
        return findings

    def _read(
        self, indices: Collection[int], wanted: Path | None = None
    ) -> Iterator[tuple[PartManifest, StoredUpdateMeta]]:
        for index in sorted(indices):
            listed = self._root.parts[index]
            folder = self._folder_of(index)
            if folder is None or (wanted is not None and folder != wanted):
                path = self.paths(wanted or self._updates, index)[0]
                raise StoreCorrupted(f"{path}: is incomplete, its manifest has {count_of(listed.num_bytes, 'byte')}")
            yield read_findings(self.paths(folder, index)[1], listed)


def read_findings(path: Path, listed: Part) -> tuple[PartManifest, StoredUpdateMeta]:
    """Read a part's manifest and its findings.

    Args:
        path: the file.
        listed: the part in the update's manifest.

    Raises:
        StoreCorrupted: the file is missing or damaged, or belongs to another part.
    """
    try:
        findings = decode_meta(path.read_text(), where=str(path))
        part = parse_part(findings.manifest)
    except (FileNotFoundError, ManifestError, UnicodeDecodeError) as error:
        raise StoreCorrupted(f"{path}: {error}") from error
    if digest_of(findings.manifest) != listed.sha256:
        raise StoreCorrupted(f"{path}: does not belong to the part that the update's manifest lists")
    return part, findings

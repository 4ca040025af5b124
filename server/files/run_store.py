"""The files of one run: versions of the global model, accepted updates, uploads in progress.

    versions/000012.safetensors   +   000012.manifest.json    a version: written by the fold, then its manifest
    versions/000012.momentum.safetensors  +  .manifest.json   the state of the server optimizer, written before
    updates/<digest>.bin                                      a sound update as received
    incoming/<digest>.bin                                     a partial upload, which resumes at its length

The metadata of an accepted update, and all bytes of a small one, are written with the event that accepts it
(`journal`). A version exists when its manifest does, which is written last and removed first. So a crash at any point
leaves a complete version, or files that `collect_garbage` finds. Symbolic links are never followed.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from pathlib import Path

from atoll.aggregation.codecs.names import open_codec
from atoll.aggregation.folders import sync_folder
from atoll.aggregation.printable import count_of
from atoll.aggregation.updates.inspection import Inspection, inspect
from atoll.aggregation.updates.reader import StoredUpdate
from atoll.protocol.durable import DiskFull, move_into, naming_full_disk, write_atomically
from atoll.protocol.manifest import UpdateManifest, digest_of, parse_update
from atoll.protocol.strict_json import ManifestError
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.errors import StoreCorrupted
from atoll.server.files.disk_limits import DiskLimits
from atoll.server.files.incoming import Incoming
from atoll.server.files.version_folder import VersionFolder
from atoll.server.journal.codec import StoredUpdateMeta, encode_meta

INCOMING_AGE_MAX_S = 86400.0
"""Seconds after its last byte when a partial upload is deleted."""

GONE = ".gone"
"""Suffix of a file whose deletion has begun."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_UPDATE_FILE = re.compile(r"([0-9a-f]{64})\.bin(\.gone)?")
_VERSION_FILE = re.compile(r"(\d{6,})(?:\.[a-z_]+)?\.(safetensors|manifest\.json)(\.part|\.gone)?")


@dataclass(frozen=True, slots=True)
class KeptUpdate:
    """A sound update that waits for the machine's decision, or was accepted."""

    meta: str
    """Its metadata, from `encode_meta`."""
    data: bytes | None
    """All bytes of a small update; None: they are in a file."""


class RunStore(VersionFolder):
    """The files of one run, for several threads.

    Args:
        folder: the folder of the run.
        disk: the limits of the disk space.
        has_files_only: also small updates get files.
        is_durable: versions survive a power cut, which a simulation does not need.
    """

    def __init__(
        self,
        folder: Path,
        *,
        disk: DiskLimits = DiskLimits(),  # noqa: B008 - frozen
        has_files_only: bool = False,
        is_durable: bool = True,
    ) -> None:
        self.is_durable = is_durable
        super().__init__(folder)
        self._updates, self._incoming = folder / "updates", folder / "incoming"
        self._disk, self._has_files_only = disk, has_files_only
        self._open: set[Incoming] = set()
        self._lock = threading.Lock()  # protects the set, and an upload that opens from garbage collection
        for path in (self._versions, self._updates, self._incoming):
            path.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                raise NotADirectoryError(f"{path} is a link: state is kept in the state directory itself")
        for path in (folder, folder.parent):
            sync_folder(path)

    # ------------------------------------------------------------ versions

    def write_manifest(self, version: Version, manifest: bytes, slot: str = "") -> None:
        """Write the manifest that makes a version exist, after its durable tensors and its slots."""
        write_atomically(self.manifest_path(version, slot), manifest, is_durable=self.is_durable)

    def drop_versions_after(self, newest: Version) -> None:
        """Delete all versions newer than this one, and files of theirs without a manifest."""
        _sweep(self._versions, _VERSION_FILE, lambda version, _: int(version) > newest, self._lock)

    # ------------------------------------------------------------ updates

    def incoming_path(self, digest: Digest) -> Path:
        """Return the path of an upload in progress."""
        return self._incoming / f"{_checked(digest)}.bin"

    def update_path(self, digest: Digest) -> Path:
        """Return the path of an accepted update."""
        return self._updates / f"{_checked(digest)}.bin"

    def digests(self) -> set[Digest]:
        """Return the digests of all updates on disk, complete or partial."""
        names = (
            _UPDATE_FILE.fullmatch(name) for folder in (self._updates, self._incoming) for name in os.listdir(folder)
        )
        return {Digest(name[1]) for name in names if name}

    def has_file(self, digest: Digest) -> bool:
        """Return whether a sound upload has become a file in `updates`; `kept_before` checks its bytes again."""
        with self._lock:
            return self.update_path(digest).exists()

    def open_incoming(self, digest: Digest, total_bytes: int) -> Incoming:
        """Begin or resume an upload.

        After a crash of the machine, bytes on disk may be wrong. `Incoming.inspect` detects that; then the upload must
        be discarded and sent again.

        Raises:
            DiskFull: the missing bytes do not fit: beside the other open uploads and the space that stays free, or in
                the space for a run's uploads that are not accepted yet.
        """
        path = self.incoming_path(digest)
        with self._lock:
            already = path.stat().st_size if path.exists() else 0
            reserved = sum(upload.total_bytes - upload.position for upload in self._open)
            missing, free = max(0, total_bytes - already), shutil.disk_usage(self._incoming).free
            if missing and missing + reserved + self._disk.free_min > free:
                raise DiskFull(
                    f"{self._incoming}: an update of {count_of(total_bytes, 'byte')} does not "
                    f"fit: {count_of(free, 'byte is', 'bytes are')} free, "
                    f"{reserved} are reserved for other uploads, {self._disk.free_min} stay free"
                )
            if missing and self._disk.incoming_max:
                self._check_quota(missing + reserved, total_bytes)
            with naming_full_disk(path):
                upload = Incoming(path, total_bytes, self._closed, has_file=self._has_files_only)
            self._open.add(upload)
        return upload

    def _check_quota(self, wanted: int, total_bytes: int) -> None:
        taken, most = _size_of(self._incoming), self._disk.incoming_max
        if taken + wanted > most:
            what = (
                f"an update of {count_of(total_bytes, 'byte')} does not fit: uploads that are "
                f"not accepted yet take {count_of(taken, 'byte')}, "
                f"with this one and the reserved space {taken + wanted}; allowed: {most} (incoming_max)"
            )
            raise DiskFull(f"{self._incoming}: {what}", outside=what)

    def _closed(self, upload: Incoming) -> None:
        with self._lock:
            self._open.discard(upload)

    def discard_incoming(self, digest: Digest) -> None:
        """Delete the bytes of an upload."""
        self.incoming_path(digest).unlink(missing_ok=True)

    def keep(self, upload: Incoming, manifest: UpdateManifest, inspection: Inspection) -> KeptUpdate:
        """Make a complete, sound upload durable, for the machine's decision.

        Raises:
            DiskFull: there is no room; try again.
        """
        if not upload.is_small:
            upload.sync()
            move_into(upload.path, self.update_path(manifest.digest))
            sync_folder(self._updates)
        return KeptUpdate(_meta(manifest, inspection), upload.data)

    def kept_before(self, manifest: UpdateManifest) -> KeptUpdate | None:
        """Return a sound upload whose decision or answer was lost before; None: the client must send it (again).

        Raises:
            OSError: its file cannot be read.
        """
        if not self.has_file(manifest.digest):
            return None
        path = self.update_path(manifest.digest)
        is_whole = path.stat().st_size == manifest.num_bytes
        inspection = inspect(path, manifest.pieces) if is_whole else None
        if inspection is None or not inspection.is_sound:  # bytes that were not synced are lost in a machine's crash
            path.unlink()
            return None
        sync_folder(self._updates)
        return KeptUpdate(_meta(manifest, inspection), None)

    def stored_update(self, digest: Digest, meta: StoredUpdateMeta, data: bytes | None) -> StoredUpdate:
        """Return an accepted update for the fold; `data` as in `KeptUpdate`.

        Raises:
            StoreCorrupted: its file is missing, damaged, or of another size.
            ValueError: its codec, which was admitted, is no longer installed here as it was.
        """
        path = self.update_path(digest)
        if digest_of(meta.manifest) != digest:
            raise StoreCorrupted(f"{path}: its manifest has another digest")
        try:
            manifest = parse_update(meta.manifest)
            num_bytes = path.stat(follow_symlinks=False).st_size if data is None else len(data)
        except (FileNotFoundError, ManifestError) as error:
            raise StoreCorrupted(f"{path}: {error}") from error
        if num_bytes != manifest.num_bytes:
            raise StoreCorrupted(f"{path}: has {count_of(num_bytes, 'byte')}, its manifest {manifest.num_bytes}")
        if data is not None and inspect(path, manifest.pieces, data=data).wrong_digests:
            raise StoreCorrupted(f"{path}: its bytes are not those of its manifest")
        for codec in manifest.codecs:
            open_codec(codec)
        return StoredUpdate(path, manifest.pieces, meta.magnitudes, data=data)

    # ------------------------------------------------------------ disk space

    def collect_garbage(
        self,
        live: Container[Digest],
        *,
        keep_versions: int,
        current: Version,
        pinned: Collection[Version] = (),
        keep_incoming: Callable[[Digest, float], bool] | None = None,
    ) -> int:
        """Delete files that no decision can need any more; after a crash, the next collection deletes the rest.

        Args:
            live: updates that an open decision refers to, and those that are being received or judged now. It is
                queried before each deletion, under the lock that `has_file` and `open_incoming` take.
            keep_versions: the number of newest versions that stay, with the current one; version 0 always stays.
            current: the newest committed version; files of later ones belong to a fold and stay.
            pinned: further versions that stay.
            keep_incoming: whether a partial upload that is not live stays, by its digest and the time of its last byte
                [s since the epoch]; left out: for a day.

        Returns:
            The size of the deleted files [bytes].
        """
        assert keep_versions >= 1, keep_versions
        keep = keep_incoming or (lambda _, at: time.time() - at < INCOMING_AGE_MAX_S)
        newest_old, staying = current - keep_versions, {Version(0), *pinned}

        def is_old(version: str, _: float) -> bool:
            return int(version) <= newest_old and int(version) not in staying

        def is_unused(digest: str, _: float) -> bool:
            return digest not in live

        def is_abandoned(digest: str, at: float) -> bool:
            is_open = any(upload.path.stem == digest for upload in self._open)
            return not is_open and digest not in live and not keep(Digest(digest), at)

        freed = _sweep(self._versions, _VERSION_FILE, is_old, self._lock)
        freed += _sweep(self._updates, _UPDATE_FILE, is_unused, self._lock)
        return freed + _sweep(self._incoming, _UPDATE_FILE, is_abandoned, self._lock)

    def disk_usage(self) -> dict[str, int]:
        """Return the size of the files in each of the three folders [bytes]."""
        return {folder.name: _size_of(folder) for folder in (self._versions, self._updates, self._incoming)}


def _meta(manifest: UpdateManifest, inspection: Inspection) -> str:
    return encode_meta(StoredUpdateMeta(manifest.encode(), inspection.magnitudes, inspection.squared_norms))


def _checked(digest: Digest) -> Digest:
    if _DIGEST.fullmatch(digest) is None:
        raise ValueError(f"digest {digest!r} is not 64 lower-case hexadecimal digits")
    return digest


def _sweep(folder: Path, names: re.Pattern[str], is_garbage: Callable[[str, float], bool], lock: threading.Lock) -> int:
    """Delete the regular files that are garbage, manifests before their data, and return their size [bytes].

    The lock is held while a file is judged and renamed, which is quick, and not while its blocks are freed.

    Args:
        folder: the folder of the files.
        names: the pattern of their names; other files stay.
        is_garbage: the decision, by the first group of the name and the time of the last change [s since the epoch].
        lock: the lock for each decision.
    """
    with os.scandir(folder) as entries:
        files = sorted(entries, key=lambda entry: (not entry.name.endswith(".json"), entry.name))
    freed = 0
    for entry in files:
        if (name := names.fullmatch(entry.name)) is None:
            continue
        path = Path(entry.path)
        with lock:
            stat = _stat(entry)
            if stat is None or not is_garbage(name[1], stat.st_mtime):
                continue
            if path.suffix != GONE:
                path = path.rename(path.with_name(path.name + GONE))
        path.unlink(missing_ok=True)
        freed += stat.st_size
    return freed


def _size_of(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(stat.st_size for stat in map(_stat, entries) if stat is not None)


def _stat(entry: "os.DirEntry[str]") -> os.stat_result | None:
    """Return the status of a regular file; None for anything else, links included, and for a file just deleted."""
    try:
        return entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None

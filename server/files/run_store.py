"""The files of one run: versions of the global model, accepted updates, uploads on their way in.

    versions/000012.safetensors   +   000012.manifest.json    a version: written by the fold, then its manifest
    versions/000012.momentum.safetensors  +  .manifest.json   what the server optimizer keeps beside it, written before
    updates/<digest>.bin                                      a sound update as received
    incoming/<digest>.bin                                     a partial upload: its length is where it goes on

What is known of an accepted update, and all bytes of a small one, is written with the event that accepts it
(`journal`). A version exists when its manifest is there, which is written last and removed first. So a
crash at any point leaves something whole, or something that `collect_garbage` finds. Links are never followed.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from pathlib import Path

from atoll.aggregation.folders import sync_folder
from atoll.aggregation.updates.inspection import Inspection, inspect
from atoll.aggregation.updates.reader import StoredUpdate
from atoll.protocol.durable import DiskFull, naming_full_disk, write_atomically
from atoll.protocol.manifest import UpdateManifest, digest_of, parse_update
from atoll.protocol.strict_json import ManifestError
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.errors import StoreCorrupted
from atoll.server.files.disk_limits import DiskLimits
from atoll.server.files.incoming import Incoming
from atoll.server.journal.codec import StoredUpdateMeta, encode_meta

INCOMING_AGE_MAX_S = 86400.0
"""A partial upload that nobody has continued for so long is dropped."""

GONE = ".gone"
"""The end of the name of a file whose deletion has begun."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_UPDATE_FILE = re.compile(r"([0-9a-f]{64})\.bin(\.gone)?")
_MANIFEST = re.compile(r"(\d{6,})\.manifest\.json")
_VERSION_FILE = re.compile(r"(\d{6,})(?:\.[a-z_]+)?\.(safetensors|manifest\.json)(\.part|\.gone)?")


@dataclass(frozen=True, slots=True)
class KeptUpdate:
    """A sound update that waits for the machine's decision, or was accepted."""

    meta: str
    """What is known of it, from `encode_meta`."""
    data: bytes | None
    """All bytes of a small one; None: they are in a file."""


class RunStore:
    """The files of one run; may be used by several threads. A simulation needs no versions that survive a power cut."""

    def __init__(
        self,
        folder: Path,
        *,
        disk: DiskLimits = DiskLimits(),  # noqa: B008 - frozen
        has_files_only: bool = False,
        is_durable: bool = True,
    ) -> None:
        self.is_durable = is_durable
        self._versions, self._updates = folder / "versions", folder / "updates"
        self._incoming = folder / "incoming"
        self._disk, self._has_files_only = disk, has_files_only
        self._open: set[Incoming] = set()
        self._lock = threading.Lock()  # of the set, and between opening an upload and dropping it as garbage
        for path in (self._versions, self._updates, self._incoming):
            path.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                raise NotADirectoryError(f"{path} is a link: state is kept in the state directory itself")
        for path in (folder, folder.parent):
            sync_folder(path)

    # ------------------------------------------------------------ versions

    def version_path(self, version: Version, slot: str = "") -> Path:
        """Where a version's tensors lie, or those of a slot of the server optimizer."""
        return self._versions / f"{_stem(version, slot)}.safetensors"

    def manifest_path(self, version: Version, slot: str = "") -> Path:
        """Where the manifest of `version_path` lies."""
        return self._versions / f"{_stem(version, slot)}.manifest.json"

    def write_manifest(self, version: Version, manifest: bytes, slot: str = "") -> None:
        """Let a version whose tensors are durable exist; its slots come first."""
        write_atomically(self.manifest_path(version, slot), manifest, is_durable=self.is_durable)

    def read_manifest(self, version: Version, slot: str = "") -> bytes:
        """The manifest's bytes; FileNotFoundError when the version never was or is no longer kept."""
        return self.manifest_path(version, slot).read_bytes()

    def versions(self) -> list[Version]:
        """Those that are kept, oldest first."""
        names = map(_MANIFEST.fullmatch, os.listdir(self._versions))
        return sorted(Version(int(name[1])) for name in names if name)

    def drop_versions_after(self, newest: Version) -> None:
        """Delete those that are newer than this one, also what there is of them without a manifest."""
        _sweep(self._versions, _VERSION_FILE, lambda version, _: int(version) > newest, self._lock)

    # ------------------------------------------------------------ updates

    def incoming_path(self, digest: Digest) -> Path:
        """Where an upload's bytes grow."""
        return self._incoming / f"{_checked(digest)}.bin"

    def update_path(self, digest: Digest) -> Path:
        """Where an accepted update's bytes lie."""
        return self._updates / f"{_checked(digest)}.bin"

    def digests(self) -> set[Digest]:
        """Of all updates that are here, whole or in part."""
        names = (
            _UPDATE_FILE.fullmatch(name) for folder in (self._updates, self._incoming) for name in os.listdir(folder)
        )
        return {Digest(name[1]) for name in names if name}

    def has_file(self, digest: Digest) -> bool:
        """Whether an upload was found sound and made a file of `updates`; `kept_before` tells if it still is."""
        with self._lock:
            return self.update_path(digest).exists()

    def open_incoming(self, digest: Digest, total_bytes: int) -> Incoming:
        """Begin an upload, or go on with it.

        After a crash of the machine the bytes that are there may be wrong: `Incoming.inspect` tells, and the upload
        is then to be discarded and sent again.

        Raises:
            DiskFull: what is missing does not fit beside the other open uploads, what must stay free, or what all
                uploads of the run may take until they are accepted.
        """
        path = self.incoming_path(digest)
        with self._lock:
            already = path.stat().st_size if path.exists() else 0
            promised = sum(upload.total_bytes - upload.position for upload in self._open)
            missing, free = max(0, total_bytes - already), shutil.disk_usage(self._incoming).free
            if missing and missing + promised + self._disk.free_min > free:
                raise DiskFull(
                    f"{self._incoming}: an update of {total_bytes} bytes does not fit: {free} bytes are free, "
                    f"{promised} are promised to other uploads, {self._disk.free_min} stay free"
                )
            if missing and self._disk.incoming_max:
                self._check_quota(missing + promised, total_bytes)
            with naming_full_disk(path):
                upload = Incoming(path, total_bytes, self._closed, has_file=self._has_files_only)
            self._open.add(upload)
        return upload

    def _check_quota(self, wanted: int, total_bytes: int) -> None:
        taken, most = _size_of(self._incoming), self._disk.incoming_max
        if taken + wanted > most:
            what = (
                f"an update of {total_bytes} bytes does not fit: uploads that are not accepted yet take {taken} bytes, "
                f"with what is promised {taken + wanted}; allowed are {most} (incoming_max)"
            )
            raise DiskFull(f"{self._incoming}: {what}", outside=what)

    def _closed(self, upload: Incoming) -> None:
        with self._lock:
            self._open.discard(upload)

    def discard_incoming(self, digest: Digest) -> None:
        """Forget an upload's bytes."""
        self.incoming_path(digest).unlink(missing_ok=True)

    def keep(self, upload: Incoming, manifest: UpdateManifest, inspection: Inspection) -> KeptUpdate:
        """Let a complete, sound upload wait for the machine's decision. Its file, if it has one, is durable.

        Raises:
            DiskFull: there is no room; try again.
        """
        if not upload.is_small:
            upload.sync()
            os.replace(upload.path, self.update_path(manifest.digest))
            sync_folder(self._updates)
        return KeptUpdate(_meta(manifest, inspection), upload.data)

    def kept_before(self, manifest: UpdateManifest) -> KeptUpdate | None:
        """A sound upload that is here and whose decision, or its answer, was lost; None when it must be sent (again).

        Raises:
            OSError: it cannot be read.
        """
        if not self.has_file(manifest.digest):
            return None
        path = self.update_path(manifest.digest)
        is_whole = path.stat().st_size == manifest.num_bytes
        inspection = inspect(path, manifest.pieces) if is_whole else None
        if inspection is None or not inspection.is_sound:  # the machine has crashed: what was not synced is lost
            path.unlink()
            return None
        sync_folder(self._updates)
        return KeptUpdate(_meta(manifest, inspection), None)

    def stored_update(self, digest: Digest, meta: StoredUpdateMeta, data: bytes | None) -> StoredUpdate:
        """An accepted update as the fold reads it; `data` as in `KeptUpdate`.

        Raises:
            StoreCorrupted: it is missing, damaged, or of another size.
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
            raise StoreCorrupted(f"{path}: has {num_bytes} bytes, its manifest {manifest.num_bytes}")
        if data is not None and inspect(path, manifest.pieces, data=data).wrong_digests:
            raise StoreCorrupted(f"{path}: its bytes are not those of its manifest")
        return StoredUpdate(path, manifest.pieces, meta.magnitudes, data=data)

    # ------------------------------------------------------------ room

    def collect_garbage(
        self,
        live: Container[Digest],
        *,
        keep_versions: int,
        current: Version,
        pinned: Collection[Version] = (),
        keep_incoming: Callable[[Digest, float], bool] | None = None,
    ) -> int:
        """Delete what no decision can need any more; after a crash half-way, the next time deletes the rest.

        Args:
            live: updates that an open decision refers to, and those that are being received or judged just now; asked
                before each deletion, between which and `has_file` or `open_incoming` nothing else happens.
            keep_versions: how many of the newest versions stay, the current one among them; version 0 always does.
            current: the newest committed version; files of later ones belong to a fold and are let alone.
            pinned: further versions that stay.
            keep_incoming: of a partial upload that is not live, whether it stays, from its digest and the time of its
                last byte [s since the epoch]; left out: for a day.

        Returns:
            What was freed [bytes].
        """
        assert keep_versions >= 1, keep_versions
        keep = keep_incoming or (lambda _, at: time.time() - at < INCOMING_AGE_MAX_S)
        newest_old, staying = current - keep_versions, {Version(0), *pinned}

        def is_old(version: str, _: float) -> bool:
            return int(version) <= newest_old and int(version) not in staying

        def is_unused(digest: str, _: float) -> bool:
            return digest not in live

        def is_left(digest: str, at: float) -> bool:
            is_open = any(upload.path.stem == digest for upload in self._open)
            return not is_open and digest not in live and not keep(Digest(digest), at)

        freed = _sweep(self._versions, _VERSION_FILE, is_old, self._lock)
        freed += _sweep(self._updates, _UPDATE_FILE, is_unused, self._lock)
        return freed + _sweep(self._incoming, _UPDATE_FILE, is_left, self._lock)

    def disk_usage(self) -> dict[str, int]:
        """Bytes of the files in each of the three folders."""
        return {folder.name: _size_of(folder) for folder in (self._versions, self._updates, self._incoming)}


def _meta(manifest: UpdateManifest, inspection: Inspection) -> str:
    return encode_meta(StoredUpdateMeta(manifest.encode(), inspection.magnitudes, inspection.squared_norms))


def _stem(version: Version, slot: str) -> str:
    return f"{version:06d}.{slot}" if slot else f"{version:06d}"


def _checked(digest: Digest) -> Digest:
    if _DIGEST.fullmatch(digest) is None:
        raise ValueError(f"digest {digest!r} is not 64 lower-case hexadecimal digits")
    return digest


def _sweep(folder: Path, names: re.Pattern[str], is_garbage: Callable[[str, float], bool], lock: threading.Lock) -> int:
    """Delete the regular files that are garbage, by the name's first group and the time of the last change.

    A manifest goes before its data. The lock is held while a file is judged and loses its name, which is quick, and
    not while its blocks are freed, which is not. Returns the sum of their sizes [bytes].
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
    """Of a regular file; None of anything else, links included, and of what has just gone."""
    try:
        return entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None

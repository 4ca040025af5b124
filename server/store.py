"""The files of one run: versions of the global model, accepted updates, uploads on their way in.

    versions/000012.safetensors   +   000012.manifest.json    a version: written by the fold, then its manifest
    updates/<digest>.bin          +   <digest>.json           an accepted update as received, and its sidecar
    incoming/<digest>.bin                                     a partial upload: its length is where it goes on

What has two files exists when both are there: the .json is written last of a version and removed first of both, and
an update's data get their name after the sidecar has its own. So a crash at any point leaves something whole, or
something that `collect_garbage` finds. Links are never followed.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.aggregation.blocks import StoredUpdate
from atoll.aggregation.inspection import Inspection, inspect
from atoll.aggregation.layout import Piece
from atoll.protocol.manifest import ManifestError, UpdateManifest, digest_of, parse_update
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.codec import StoreCorrupted, StoredUpdateMeta, decode_meta, encode_meta
from atoll.server.durable import DiskFull, naming_full_disk, sync_directory, write_atomically

MARGIN_BYTES = 64 << 20
"""What an upload must leave free: the journal has to be able to say that the disk is full."""

INCOMING_AGE_MAX_S = 86400.0
"""A partial upload that nobody has continued for so long is dropped."""

GONE = ".gone"
"""The end of the name of a file whose deletion has begun."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_UPDATE_FILE = re.compile(r"([0-9a-f]{64})\.(bin|json)(\.part|\.gone)?")
_VERSION_FILE = re.compile(r"(\d{6,})\.(safetensors|manifest\.json)(\.part|\.gone)?")

SMALL_BYTES = 64 * 1024
"""An upload up to this size grows in memory: to make a file may take as long as the disk is busy."""


class Incoming:
    """An upload that is being written; `position` is how much of it is here. Threads must not share one.

    A small one is written at `write_out`, or at the end of the block, also when it was cut; only a crash loses it.
    """

    def __init__(self, path: Path, total_bytes: int, on_close: Callable[["Incoming"], None]) -> None:
        self.path, self.total_bytes = path, total_bytes
        self._on_close = on_close
        self._buffer, self._file, self.position = bytearray(), -1, 0
        if total_bytes > SMALL_BYTES or os.path.lexists(path):
            self._open()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self.position = os.fstat(self._file).st_size
        if self.position > self.total_bytes:
            os.ftruncate(self._file, self.total_bytes)
            self.position = self.total_bytes

    def append(self, data: bytes) -> None:
        """Write the next bytes.

        Raises:
            ValueError: they go beyond the announced size.
            DiskFull: some of them may be written, and `position` says how many.
        """
        if self.position + len(data) > self.total_bytes:
            raise ValueError(f"{len(data)} bytes at {self.position} go beyond the announced {self.total_bytes}")
        if self._file < 0:
            self._buffer += data
            self.position += len(data)
        else:
            self._write(data)

    def write_out(self) -> None:
        """Let the file have what is only in memory; raises as `append`."""
        if self._file < 0:
            with naming_full_disk(self.path):
                self._open()
            self.position = 0
            self._write(bytes(self._buffer))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with naming_full_disk(self.path):
            while view:  # at its own position: two uploads of one digest write the same bytes to the same places
                count = os.pwrite(self._file, view, self.position)
                self.position += count
                view = view[count:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._buffer:
                self.write_out()
        finally:
            self._on_close(self)
            if self._file >= 0:
                os.close(self._file)


class RunStore:
    """The files of one run; may be used by several threads."""

    def __init__(self, folder: Path, *, margin_bytes: int = MARGIN_BYTES) -> None:
        self._versions, self._updates = folder / "versions", folder / "updates"
        self._incoming = folder / "incoming"
        self._margin_bytes = margin_bytes
        self._open: set[Incoming] = set()
        self._lock = threading.Lock()  # of the set, and between opening an upload and dropping it as garbage
        for path in (self._versions, self._updates, self._incoming):
            path.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                raise NotADirectoryError(f"{path} is a link: state is kept in the state directory itself")
        for path in (folder, folder.parent):
            sync_directory(path)

    # ------------------------------------------------------------ versions

    def version_path(self, version: Version) -> Path:
        """Where a version's tensors lie."""
        return self._versions / f"{version:06d}.safetensors"

    def manifest_path(self, version: Version) -> Path:
        """Where a version's manifest lies."""
        return self._versions / f"{version:06d}.manifest.json"

    def write_manifest(self, version: Version, manifest: bytes) -> None:
        """Let a version whose tensors are durable exist."""
        write_atomically(self.manifest_path(version), manifest)

    def read_manifest(self, version: Version) -> bytes:
        """The manifest's bytes; FileNotFoundError when the version never was or is no longer kept."""
        return self.manifest_path(version).read_bytes()

    def versions(self) -> list[Version]:
        """Those that are kept, oldest first."""
        names = (_VERSION_FILE.fullmatch(name) for name in os.listdir(self._versions))
        found = {Version(int(name[1])) for name in names if name and name[2] == "manifest.json" and not name[3]}
        return sorted(version for version in found if self.version_path(version).is_file())

    # ------------------------------------------------------------ updates

    def incoming_path(self, digest: Digest) -> Path:
        """Where an upload's bytes grow."""
        return self._incoming / f"{_checked(digest)}.bin"

    def update_path(self, digest: Digest) -> Path:
        """Where an accepted update's bytes lie."""
        return self._updates / f"{_checked(digest)}.bin"

    def sidecar_path(self, digest: Digest) -> Path:
        """Where an accepted update's `StoredUpdateMeta` lies."""
        return self._updates / f"{_checked(digest)}.json"

    def updates(self) -> set[Digest]:
        """Those of which any file is there."""
        return {Digest(name[1]) for name in map(_UPDATE_FILE.fullmatch, os.listdir(self._updates)) if name}

    def has_update(self, digest: Digest) -> bool:
        """Whether an upload was found sound and made a stored update; its name may not be on disk: `sync_names`."""
        with self._lock:
            return self.update_path(digest).exists() and self.sidecar_path(digest).exists()

    def sync_names(self) -> None:
        """Make the names of the stored updates durable, as `promote` does in the end."""
        sync_directory(self._updates)

    def open_incoming(self, digest: Digest, total_bytes: int) -> Incoming:
        """Begin an upload, or go on with it.

        After a crash of the machine the bytes that are there may be wrong: `inspect_incoming` tells, and the upload
        is then to be discarded and sent again.

        Raises:
            DiskFull: what is missing does not fit beside the other open uploads and the margin.
        """
        path = self.incoming_path(digest)
        with self._lock:
            already = path.stat().st_size if path.exists() else 0
            promised = sum(upload.total_bytes - upload.position for upload in self._open)
            missing, free = max(0, total_bytes - already), shutil.disk_usage(self._incoming).free
            if missing and missing + promised + self._margin_bytes > free:
                raise DiskFull(
                    f"{self._incoming}: an update of {total_bytes} bytes does not fit: {free} bytes are free, "
                    f"{promised} are promised to other uploads, {self._margin_bytes} stay free"
                )
            with naming_full_disk(path):
                upload = Incoming(path, total_bytes, self._closed)
            self._open.add(upload)
        return upload

    def _closed(self, upload: Incoming) -> None:
        with self._lock:
            self._open.discard(upload)

    def inspect_incoming(self, digest: Digest, pieces: Iterable[Piece]) -> Inspection:
        """Look at every byte of a complete upload; TensorFileCorrupted (an OSError) when it is not complete."""
        return inspect(self.incoming_path(digest), pieces)

    def discard_incoming(self, digest: Digest) -> None:
        """Forget an upload's bytes."""
        self.incoming_path(digest).unlink(missing_ok=True)

    def promote(self, digest: Digest, manifest: UpdateManifest, inspection: Inspection) -> None:
        """Make a complete, sound upload a stored update; durable when this returns. May be repeated.

        Raises:
            DiskFull: there is no room for the sidecar; try again.
            FileNotFoundError: there is no such upload, and no such update either.
        """
        data, sidecar = self.update_path(digest), self.sidecar_path(digest)
        source = self.incoming_path(digest)
        if not source.exists() and self.has_update(digest):
            return sync_directory(self._updates)
        file = os.open(source, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with naming_full_disk(source):
                os.fdatasync(file)
        finally:
            os.close(file)
        meta = StoredUpdateMeta(manifest.encode(), inspection.magnitudes, inspection.squared_norms)
        write_atomically(sidecar, encode_meta(meta).encode(), sync_name=False)
        os.replace(source, data)
        sync_directory(self._updates)

    def update_meta(self, digest: Digest) -> StoredUpdateMeta:
        """What is known of an accepted update.

        Raises:
            StoreCorrupted: the sidecar is missing or damaged.
        """
        path = self.sidecar_path(digest)
        try:
            meta = decode_meta(path.read_text(encoding="utf-8"), where=str(path))
        except (FileNotFoundError, UnicodeDecodeError) as error:
            raise StoreCorrupted(f"{path}: {error}") from error
        if digest_of(meta.manifest) != digest:
            raise StoreCorrupted(f"{path}: its manifest has another digest")
        return meta

    def stored_update(self, digest: Digest) -> StoredUpdate:
        """An accepted update as the fold reads it.

        Raises:
            StoreCorrupted: a file of it is missing, damaged, or of another size.
        """
        meta, path = self.update_meta(digest), self.update_path(digest)
        try:
            manifest = parse_update(meta.manifest)
            num_bytes = path.stat(follow_symlinks=False).st_size
        except (FileNotFoundError, ManifestError) as error:
            raise StoreCorrupted(f"{path}: {error}") from error
        if num_bytes != manifest.num_bytes:
            raise StoreCorrupted(f"{path}: has {num_bytes} bytes, its manifest {manifest.num_bytes}")
        return StoredUpdate(path, manifest.pieces, meta.magnitudes)

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
                before each deletion, between which and `has_update` or `open_incoming` nothing else happens.
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
        usage = {}
        for folder in (self._versions, self._updates, self._incoming):
            with os.scandir(folder) as entries:
                usage[folder.name] = sum(stat.st_size for stat in map(_stat, entries) if stat is not None)
        return usage


def _checked(digest: Digest) -> Digest:
    if _DIGEST.fullmatch(digest) is None:
        raise ValueError(f"digest {digest!r} is not 64 lower-case hexadecimal digits")
    return digest


def _sweep(folder: Path, names: re.Pattern[str], is_garbage: Callable[[str, float], bool], lock: threading.Lock) -> int:
    """Delete the regular files that are garbage, by the name's first group and the time of the last change.

    Each .json goes before its data. The lock is held while a file is judged and loses its name, which is quick, and
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


def _stat(entry: "os.DirEntry[str]") -> os.stat_result | None:
    """Of a regular file; None of anything else, links included, and of what has just gone."""
    try:
        return entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None

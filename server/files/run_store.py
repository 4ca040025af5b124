"""The files of one run: versions of the global model, accepted updates, uploads in progress.

    versions/000012.safetensors   +   000012.manifest.json    a version: written by the fold, then its manifest
    versions/000012.momentum.safetensors  +  .manifest.json   the state of the server optimizer, written before
    updates/<digest>.bin                                      a sound update as received
    incoming/<digest>.bin                                     a partial upload, which resumes at its length
    updates/, incoming/<digest>.0003.*                        part 3 of an update: see `part_files`

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

from atoll.ground.durable import DiskFull, QuotaFull, move_into, naming_full_disk, write_atomically
from atoll.ground.folders import sync_folder
from atoll.ground.printable import count_of, printable_size
from atoll.ground.strict_json import ManifestError
from atoll.protocol.manifest import UpdateManifest, digest_of, parse_update
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.errors import StoreCorrupted, UpdateDamaged
from atoll.server.files.disk_limits import DiskLimits
from atoll.server.files.incoming import Incoming
from atoll.server.files.part_files import PartFiles, file_stem
from atoll.server.files.part_notes import PartNotes
from atoll.server.files.version_folder import VersionFolder
from atoll.server.journal.codec import StoredUpdateMeta, encode_meta
from atoll.tensors.codecs.names import open_codec
from atoll.tensors.layout import Piece
from atoll.tensors.updates.inspection import Inspection, inspect
from atoll.tensors.updates.reader import StoredUpdate

INCOMING_AGE_MAX_S = 86400.0
"""Seconds after its last byte when a partial upload is deleted."""

GONE = ".gone"
"""Suffix of a file that is being deleted."""

DIGEST_CHARACTERS = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")
_UPDATE_FILE = re.compile(r"([0-9a-f]{64})(?:\.\d{4})?\.(?:bin|json)(\.part|\.gone)?")
_VERSION_FILE = re.compile(r"(\d{6,})(?:\.[a-z_]+)?\.(safetensors|manifest\.json)(\.part|\.gone)?")


@dataclass(frozen=True, slots=True)
class KeptUpdate:
    """Sound update that waits for the machine's decision, or was accepted."""

    meta: str
    """The update's metadata, from `encode_meta`."""
    data: bytes | None
    """All bytes of a small update; None: they are in a file."""


class RunStore(VersionFolder):
    """Files of one run, for several threads.

    Args:
        folder: the folder of the run.
        disk: the limits of the disk space.
        has_files_only: whether small updates get files, too.
        is_durable: whether versions survive a power failure, which a simulation does not need.
        has_values: whether updates have values to inspect; False: they are the words of secure sums.
    """

    def __init__(
        self,
        folder: Path,
        *,
        disk: DiskLimits = DiskLimits(),  # noqa: B008 - frozen
        has_files_only: bool = False,
        is_durable: bool = True,
        has_values: bool = True,
    ) -> None:
        self.is_durable, self.has_values = is_durable, has_values
        super().__init__(folder)
        self._updates, self._incoming = folder / "updates", folder / "incoming"
        self._disk, self._has_files_only = disk, has_files_only
        self._open: dict[Incoming, int] = {}  # room reserved for all parts of an upload's update; 0: for itself alone
        self._lock = threading.Lock()  # protects the mapping, and an upload being opened, from garbage collection
        for path in (self._versions, self._updates, self._incoming):
            path.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                raise NotADirectoryError(f"{path} is a link: state is kept in the state directory itself")
        self._before = frozenset(os.listdir(self._updates))  # updates that another process received
        for path in (folder, folder.parent):
            sync_folder(path)

    # ------------------------------------------------------------ versions

    def write_manifest(self, version: Version, manifest: bytes, slot: str = "") -> None:
        """Write the manifest that makes a version exist, after its durable tensors and its slots."""
        write_atomically(self.manifest_path(version, slot), manifest, is_durable=self.is_durable)

    def drop_versions_after(self, newest: Version) -> None:
        """Delete all versions newer than this one, and their files without a manifest."""
        _sweep(self._versions, _VERSION_FILE, lambda version, _: int(version) > newest, self._lock)

    # ------------------------------------------------------------ updates

    def incoming_path(self, digest: Digest, part: int | None = None) -> Path:
        """Return the path of an upload in progress, or of a part of one."""
        return self._incoming / f"{file_stem(_checked(digest), part)}.bin"

    def update_path(self, digest: Digest) -> Path:
        """Return the path of an accepted update; one in parts has this name, but no such file."""
        return self._updates / f"{_checked(digest)}.bin"

    def parts_of(self, manifest: UpdateManifest, digest: Digest) -> PartFiles:
        """Return the files of an update in parts."""
        return PartFiles(self._incoming, self._updates, manifest, _checked(digest))

    def notes_of(self, manifest: UpdateManifest, digest: Digest) -> PartNotes:
        """Return the notes about an update whose parts are at ranks."""
        return PartNotes(self._incoming, manifest, _checked(digest))

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

    def open_incoming(
        self, digest: Digest, total_bytes: int, *, part: int | None = None, whole_bytes: int = 0
    ) -> Incoming:
        """Begin or resume an upload, or a part of one.

        Room is reserved for the whole update, so that if two do not fit together, one can finish.

        After a crash of the machine, bytes on disk may be wrong. `Incoming.inspect` detects that; then the upload must
        be discarded and sent again.

        Args:
            digest: digest of the update.
            total_bytes: size of the update or of the part.
            part: the part's index; None: the update has no parts.
            whole_bytes: the size of all parts, if they arrive here; 0: only this one needs room.

        Raises:
            DiskFull: the missing bytes do not fit beside the other open uploads and the space that stays free, or
                exceed the limit of a run's uploads that are not accepted yet.
        """
        path = self.incoming_path(digest, part)
        with self._lock:
            if whole_bytes:
                wanted, already = whole_bytes, _size_of(self._incoming, digest)
            else:
                wanted, already = total_bytes, path.stat().st_size if path.exists() else 0
            reserved = self._reserved(digest)
            missing, free = max(0, wanted - already), shutil.disk_usage(self._incoming).free
            if missing and missing + reserved + self._disk.free_min > free:
                raise DiskFull(
                    f"{self._incoming}: an update of {printable_size(wanted)} does not fit: {printable_size(free)} are "
                    f"free, {printable_size(reserved)} are reserved for other uploads, "
                    f"{printable_size(self._disk.free_min)} stay free (coordinator.disk_free_min)"
                )
            if missing and self._disk.incoming_max:
                self._check_quota(missing + reserved, wanted)
            with naming_full_disk(path):
                has_file = self._has_files_only or part is not None
                upload = Incoming(path, total_bytes, self._closed, has_file=has_file, has_values=self.has_values)
            self._open[upload] = whole_bytes
        return upload

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the disk has room for `num_bytes` more bytes, beside the space that stays free."""
        return self._disk.has_room(self._incoming, num_bytes)

    def _reserved(self, digest: Digest) -> int:
        """Return the missing bytes of the other open updates; an update whose parts are open counts once."""
        wholes: dict[str, int] = {}
        reserved = 0
        for upload, whole_bytes in self._open.items():
            if not whole_bytes:
                reserved += upload.total_bytes - upload.position
            elif (owner := upload.path.name[:DIGEST_CHARACTERS]) != digest:
                wholes[owner] = whole_bytes
        return reserved + sum(max(0, whole - _size_of(self._incoming, owner)) for owner, whole in wholes.items())

    def _check_quota(self, wanted: int, total_bytes: int) -> None:
        taken, most = _size_of(self._incoming), self._disk.incoming_max
        if taken + wanted > most:
            what = (
                f"an update of {count_of(total_bytes, 'byte')} does not fit: uploads that are "
                f"not accepted yet take {count_of(taken, 'byte')}, "
                f"with this one and the reserved space {taken + wanted}; allowed: {most} (incoming_max)"
            )
            raise QuotaFull(f"{self._incoming}: {what}", outside=what)

    def _closed(self, upload: Incoming) -> None:
        with self._lock:
            self._open.pop(upload, None)

    def discard_incoming(self, digest: Digest, part: int | None = None) -> None:
        """Delete the bytes of an upload, with all of its parts, or of one part."""
        self.incoming_path(digest, part).unlink(missing_ok=True)
        if part is None:
            for path in sorted(self._incoming.glob(f"{digest}.*"), reverse=True):  # findings before the bytes
                path.unlink(missing_ok=True)

    def discard_parts(self, digest: Digest) -> None:
        """Delete the present files of an update in parts, kept parts included: it will not be accepted."""
        self.discard_incoming(digest)
        for path in sorted(self._updates.glob(f"{_checked(digest)}.[0-9]*"), reverse=True):  # findings first
            path.unlink(missing_ok=True)

    def keep(self, upload: Incoming, manifest: UpdateManifest, inspection: Inspection) -> KeptUpdate:
        """Make a complete, sound upload durable, for the machine's decision.

        Raises:
            DiskFull: the disk is full; try again.
        """
        if not upload.is_small:
            upload.sync()
            move_into(upload.path, self.update_path(manifest.digest))
            sync_folder(self._updates)
        return KeptUpdate(_meta(manifest, inspection), upload.data)

    def keep_whole(self, manifest: UpdateManifest) -> KeptUpdate:
        """Make an update of kept parts complete, for the machine's decision.

        Raises:
            StoreCorrupted: a part is missing.
            DiskFull: the disk is full; try again.
        """
        return KeptUpdate(encode_meta(self.parts_of(manifest, manifest.digest).make_whole()), None)

    def kept_before(self, manifest: UpdateManifest) -> KeptUpdate | None:
        """Return a sound upload whose decision or answer was lost; None: the client must send it (again).

        Raises:
            OSError: the file of the upload cannot be read.
        """
        if not self.has_file(manifest.digest):
            return None
        path = self.update_path(manifest.digest)
        is_whole = path.stat().st_size == manifest.num_bytes
        inspection = inspect(path, manifest.pieces, has_values=self.has_values) if is_whole else None
        if inspection is None or not inspection.is_sound:  # unsynced bytes are lost in a crash of the machine
            path.unlink()
            return None
        sync_folder(self._updates)
        return KeptUpdate(_meta(manifest, inspection), None)

    def stored_update(
        self, digest: Digest, meta: StoredUpdateMeta, data: bytes | None, *, rank: int = 0
    ) -> StoredUpdate:
        """Return an accepted update for the fold, or this rank's share of it; `data` as in `KeptUpdate`.

        An update accepted by an earlier process is checked against its manifest: it may have been damaged since.

        Raises:
            UpdateDamaged: the file of the update is missing, damaged, or of another size.
            ValueError: the codec of the update was changed or uninstalled since it was admitted.
        """
        try:
            return self._stored(digest, meta, data, rank)
        except StoreCorrupted as error:
            raise UpdateDamaged(digest, str(error)) from error

    def _stored(self, digest: Digest, meta: StoredUpdateMeta, data: bytes | None, rank: int) -> StoredUpdate:
        path = self.update_path(digest)
        if digest_of(meta.manifest) != digest:
            raise StoreCorrupted(f"{path}: its manifest has another digest")
        try:
            manifest = parse_update(meta.manifest)
            if manifest.parts:
                here = meta.parts_at(rank)
                parts = [(file, part.pieces) for file, part in self.parts_of(manifest, digest).pieces(here)]
                for file, pieces in parts:
                    self._check(file, pieces)
                return StoredUpdate.of_parts(path, parts, meta.magnitudes, is_partial=here is not None)
            num_bytes = path.stat(follow_symlinks=False).st_size if data is None else len(data)
        except (FileNotFoundError, ManifestError) as error:
            raise StoreCorrupted(f"{path}: {error}") from error
        if num_bytes != manifest.num_bytes:
            raise StoreCorrupted(f"{path}: has {count_of(num_bytes, 'byte')}, its manifest {manifest.num_bytes}")
        self._check(path, manifest.pieces, data)
        for codec in manifest.codecs:
            open_codec(codec)
        return StoredUpdate(path, manifest.pieces, meta.magnitudes, data=data)

    def _check(self, path: Path, pieces: tuple[Piece, ...], data: bytes | None = None) -> None:
        if data is None and path.name not in self._before:
            return
        if inspect(path, pieces, data=data, has_values=False).wrong_digests:
            raise StoreCorrupted(f"{path}: its bytes do not match its manifest; put it back from a backup")

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
            live: updates that an open decision refers to, or that are being received or judged now. It is queried
                before each deletion, under the lock that `has_file` and `open_incoming` take.
            keep_versions: the number of newest versions to keep, with the current one; version 0 is always kept.
            current: the newest committed version; later files belong to a fold and are kept.
            pinned: further versions to keep.
            keep_incoming: whether to keep a partial upload that is not live, by its digest and the time of its last
                byte [s since the epoch]; default: for a day.

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

        newest = _newest_of(self._incoming)  # the parts of an update are kept, and deleted, together

        def is_abandoned(digest: str, at: float) -> bool:
            is_open = any(upload.path.name[:DIGEST_CHARACTERS] == digest for upload in self._open)
            at = max(at, newest.get(digest, at))
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

    The lock is held while a file is judged and renamed, which is quick, but not while its blocks are freed.

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


def _size_of(folder: Path, beginning: str = "") -> int:
    with os.scandir(folder) as entries:
        stats = (_stat(entry) for entry in entries if entry.name.startswith(beginning))
        return sum(stat.st_size for stat in stats if stat is not None)


def _newest_of(folder: Path) -> dict[str, float]:
    """Return the time of the last change of each upload's files [s since the epoch]."""
    newest: dict[str, float] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            name, stat = _UPDATE_FILE.fullmatch(entry.name), _stat(entry)
            if name is not None and stat is not None:
                newest[name[1]] = max(newest.get(name[1], 0.0), stat.st_mtime)
    return newest


def _stat(entry: "os.DirEntry[str]") -> os.stat_result | None:
    """Return the status of a regular file; None for anything else, including links and just deleted files."""
    try:
        return entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None

"""The spool of finished updates: durable before their first byte is sent, deleted when the coordinator has answered.

An entry is one file, which appears under its name complete and durable, or not at all:

    safetensors file of the update | JSON: manifest and measurements | its length (8 bytes, little-endian) | MAGIC

The bytes of the pieces follow each other from `data_start` on, in canonical order, and are sent as they lie there. The
manifest alone identifies an entry (its run, its round); the file's name is for people.
"""

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.aggregation.folders import sync_folder
from atoll.aggregation.printable import count_of
from atoll.aggregation.tensors.safetensors_file import parse_header
from atoll.client.session.events import Key, Sums
from atoll.protocol.durable import move_into
from atoll.protocol.manifest import UpdateManifest, parse_update
from atoll.protocol.vocabulary import Digest, RunId

logger = logging.getLogger(__name__)

MAGIC = b"atoll/1\n"
SUFFIX = ".update"
_FOOT_BYTES = 8 + len(MAGIC)
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,100}")


class SpoolFull(OSError):
    """No room for one more update, on the disk or within `spool_max_bytes`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished update on disk, with what its upload opens with."""

    path: Path
    manifest: bytes
    digest: Digest
    data_start: int
    num_bytes: int
    """Size of all pieces [bytes]."""
    statistics: Sums
    download_seconds: float
    train_seconds: float
    rank: int = 0
    """The aggregation rank that it is for."""


class Spool:
    """The entries in one folder. `add` may run on a thread; all other methods are quick."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._entries: dict[Key, Entry] = dict(_read_all(folder))

    def entries(self) -> dict[Key, Digest]:
        """Return the digests of all entries, by key."""
        return {key: entry.digest for key, entry in self._entries.items()}

    def __getitem__(self, key: Key) -> Entry:
        return self._entries[key]

    def check_room(self, num_bytes: int) -> None:
        """Check that an update of `num_bytes` fits, before any work is spent on it.

        Raises:
            SpoolFull: it does not; the message has the numbers.
        """
        used = sum(entry.num_bytes for entry in list(self._entries.values()))
        if used + num_bytes > self._max_bytes:
            raise SpoolFull(
                errno.EDQUOT,
                f"an update of {count_of(num_bytes, 'byte')} does not fit: "
                f"{used} of spool_max_bytes ({self._max_bytes}) wait for the coordinator's answer",
            )

    def add(
        self,
        data: Path,
        manifest: UpdateManifest,
        *,
        statistics: Sums,
        download_seconds: float = 0.0,
        train_seconds: float = 0.0,
        rank: int = 0,
    ) -> Entry:
        """Turn a safetensors file of the manifest's pieces into an entry, by moving it; durable on return.

        Args:
            data: the file; it is gone afterwards, also when there is no room.
            manifest: of the update.
            statistics: sums of the training, merged by addition at the coordinator.
            download_seconds: duration of the download of the base version [s].
            train_seconds: duration of the training [s].
            rank: the aggregation rank that the update is for.

        Raises:
            SpoolFull: there is no room.
        """
        try:
            self.check_room(manifest.num_bytes)
            entry = self._add(data, manifest, statistics, download_seconds, train_seconds, rank)
        except OSError as error:
            data.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, SpoolFull):
                raise SpoolFull(error.errno, f"the update cannot be stored: {error.strerror}") from error
            raise
        self._entries[_key(manifest)] = entry
        return entry

    def _add(
        self,
        data: Path,
        manifest: UpdateManifest,
        statistics: Sums,
        download_seconds: float,
        train_seconds: float,
        rank: int,
    ) -> Entry:
        _, data_start = parse_header(data)
        path = self._folder / _name(manifest)
        encoded = manifest.encode()
        digest = Digest(hashlib.sha256(encoded).hexdigest())
        entry = Entry(
            path,
            encoded,
            digest,
            data_start,
            manifest.num_bytes,
            dict(statistics),
            download_seconds,
            train_seconds,
            rank,
        )
        with data.open("ab") as file:
            file.write(_trailer(entry))
            file.flush()
            os.fsync(file.fileno())
        move_into(data, path)
        sync_folder(self._folder)
        return entry

    def discard(self, key: Key) -> None:
        """Delete an entry. If a crash undoes the deletion, the update is sent again and gets the same answer."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.path.unlink(missing_ok=True)


def _key(manifest: UpdateManifest) -> Key:
    return ("round", manifest.run_id, manifest.round_id)


def plain_name(run_id: RunId) -> str:
    """Return the beginning of a file name for a run: its id, or a hash where the id might lead out of the folder."""
    if _PLAIN.fullmatch(run_id) is None:
        return "run." + hashlib.sha256(run_id.encode()).hexdigest()[:32]
    return run_id


def _name(manifest: UpdateManifest) -> str:
    return f"{plain_name(manifest.run_id)}.{manifest.round_id}{SUFFIX}"


def _trailer(entry: Entry) -> bytes:
    document = {
        "manifest": entry.manifest.decode("ascii"),
        "data_start": entry.data_start,
        "statistics": entry.statistics,
        "download_seconds": entry.download_seconds,
        "train_seconds": entry.train_seconds,
        "rank": entry.rank,
    }
    body = json.dumps(document).encode()
    return body + len(body).to_bytes(8, "little") + MAGIC


def _read_all(folder: Path) -> Iterator[tuple[Key, Entry]]:
    for path in sorted(folder.iterdir()):
        try:
            yield _read(path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s is not a whole update and is removed: %s", path, error)
            path.unlink()


def _read(path: Path) -> tuple[Key, Entry]:
    """Read an entry back; raises ValueError, KeyError, TypeError or AttributeError when `add` has not written it."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        foot = os.pread(file.fileno(), _FOOT_BYTES, max(0, size - _FOOT_BYTES))
        length = int.from_bytes(foot[:8], "little")
        begin = size - _FOOT_BYTES - length
        if path.suffix != SUFFIX or foot[8:] != MAGIC or begin < 0:
            raise ValueError("its end is missing")
        document: Mapping[str, Any] = json.loads(os.pread(file.fileno(), length, begin))
    encoded = document["manifest"].encode("ascii")
    manifest = parse_update(encoded)
    data_start = int(document["data_start"])
    if path.name != _name(manifest) or data_start + manifest.num_bytes != begin:
        raise ValueError("its name or length does not match its manifest")
    return _key(manifest), Entry(
        path=path,
        manifest=encoded,
        digest=Digest(hashlib.sha256(encoded).hexdigest()),
        data_start=data_start,
        num_bytes=manifest.num_bytes,
        statistics={name: tuple(map(float, sums)) for name, sums in document["statistics"].items()},
        rank=int(document.get("rank", 0)),
        download_seconds=float(document["download_seconds"]),
        train_seconds=float(document["train_seconds"]),
    )

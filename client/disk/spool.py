"""The spool of finished updates: durable before their first byte is sent, deleted when the coordinator has answered.

An entry is one file, which appears under its name atomically, complete and durable:

    safetensors file of the update | JSON: manifest and measurements | its SHA-256 | its length (8 bytes) | MAGIC

The bytes of the pieces follow each other from `data_start` on, in canonical order, and are sent in this order. The
manifest alone identifies an entry (its run, its round); the file's name is for people.

An update in parts is a folder: for each part its bytes and its manifest, and the rest of the entry in `root.json`,
which is written last. A folder without this file is incomplete, and is removed.

    part.0000, part.0000.json, part.0001, ..., root.json

A file whose JSON does not match its SHA-256 is removed, too: its round is trained again. The coordinator checks the
bytes of the pieces.
"""

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atoll.client.session.events import Key, Sums
from atoll.ground.durable import move_into, remove, write_atomically
from atoll.ground.folders import finds_no_room, sync_folder
from atoll.ground.printable import count_of
from atoll.ground.process import crash_points
from atoll.protocol.log_fields import number_of
from atoll.protocol.manifest import UpdateManifest, digest_of, parse_update
from atoll.protocol.part_manifest import PartManifest, part_of
from atoll.protocol.vocabulary import Digest, RunId
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.tensors.pieces import part_name
from atoll.tensors.safetensors_file import parse_header

logger = logging.getLogger(__name__)

MAGIC = b"atoll/2\n"
MAGIC_BEFORE = b"atoll/1\n"
"""End of an entry written by an earlier program, without a SHA-256."""

SUFFIX, FOLDER_SUFFIX = ".update", ".parts"
ROOT = "root.json"
_SUM_BYTES, _FOOT_BYTES = 32, 8 + len(MAGIC)
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,100}")


class SpoolFull(OSError):
    """Error: no room for one more update, on the disk or within `spool_max_bytes`."""


@dataclass(frozen=True, slots=True)
class EntryPart:
    """Part of a finished update on disk."""

    path: Path
    manifest: bytes
    num_bytes: int
    """Size of the part's pieces [bytes]."""
    data_start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of an update at its site."""

    download_seconds: float = 0.0
    """Duration of the download of the base version [s]."""
    train_seconds: float = 0.0
    """Duration of the training [s]."""
    mesh: MeshUse | None = None
    """Use of a mesh; None: one process."""
    steps: int = 0
    """Number of optimizer steps; 0: not known."""


NO_COSTS = Costs()


@dataclass(frozen=True, slots=True)
class Entry:
    """Finished update on disk, with the data that opens its upload."""

    path: Path
    manifest: bytes
    digest: Digest
    data_start: int
    num_bytes: int
    """Size of all pieces [bytes]."""
    statistics: Sums
    costs: Costs
    rank: int = 0
    """Aggregation rank that receives the update."""
    spreads: bool = False
    """Whether part i goes to rank (rank + i) modulo the number of ranks; else all parts go to `rank`."""
    parts: tuple[EntryPart, ...] = ()
    """Parts, in order, each sent on its own stream; empty: the update is sent as a whole."""
    terms: str = ""
    """Of an update that is encoded for a secure sum, its `Terms.of_sum`, in hexadecimal: it is in no other sum."""
    run_number: int = 0
    """Number of the run, from which the ids of its traces follow; 0: not known, or it has none."""


class Spool:
    """Spool of finished updates in one folder. `add` may run on a thread; all other methods are quick."""

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
            SpoolFull: the update does not fit; the message has the sizes.
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
        costs: Costs = NO_COSTS,
        rank: int = 0,
        spreads: bool = False,
        parts: Sequence[PartManifest] = (),
        terms: str = "",
    ) -> Entry:
        """Move a safetensors file of the manifest's pieces into the spool as an entry; durable on return.

        Args:
            data: the file; or the folder of an update in parts, with the bytes of the pieces of each one in
                `part_name(index)`. It is removed even if there is no room.
            manifest: the manifest of the update.
            parts: the manifests of its parts, in order.
            statistics: sums of the training, merged by addition at the coordinator.
            costs: the costs of the update.
            rank: the aggregation rank that the update is for.
            spreads: whether its parts go to this rank and the following ones, in turn.
            terms: as in `Entry`.

        Raises:
            SpoolFull: there is no room.
        """
        try:
            self.check_room(manifest.num_bytes)
            path = self._folder / (_name(manifest) if not parts else _folder_name(manifest))
            entry = Entry(
                path,
                encoded := manifest.encode(),
                digest_of(encoded),
                0 if parts else parse_header(data)[1],
                manifest.num_bytes,
                dict(statistics),
                costs,
                rank,
                spreads,
                tuple(_part_in(path, part) for part in parts),
                terms,
                number_of(manifest.run_id),
            )
            add = self._add_folder if parts else self._add_file
            add(data, entry)
        except OSError as error:
            remove(data)
            if finds_no_room(error) and not isinstance(error, SpoolFull):
                raise SpoolFull(error.errno, f"the update cannot be stored: {error.strerror}") from error
            raise
        self._entries[_key(manifest)] = entry
        return entry

    def _add_file(self, data: Path, entry: Entry) -> None:
        with data.open("ab") as file:
            file.write(_trailer(entry))
            file.flush()
            os.fsync(file.fileno())
        move_into(data, entry.path)
        sync_folder(self._folder)

    def _add_folder(self, data: Path, entry: Entry) -> None:
        """Move the parts into a folder of the spool; write the file that makes them an entry last."""
        remove(entry.path)  # from an earlier attempt that ran out of space
        entry.path.mkdir()
        try:
            for index, part in enumerate(entry.parts):
                source = data / part_name(index)
                with source.open("rb") as file:
                    os.fsync(file.fileno())
                move_into(source, part.path)
                write_atomically(part.path.with_name(f"{part.path.name}.json"), part.manifest, sync_name=False)
                crash_points.reached("agent.part_written")
            sync_folder(entry.path)
            write_atomically(entry.path / ROOT, _trailer(entry))
            sync_folder(self._folder)
        except OSError:
            remove(entry.path)
            raise
        crash_points.reached("agent.root_spooled")
        remove(data)

    def discard(self, key: Key) -> None:
        """Delete an entry. If a crash undoes the deletion, the update is sent again and gets the same answer."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            if entry.parts:  # after a crash while they are deleted, the rest is not an entry
                (entry.path / ROOT).unlink(missing_ok=True)
            remove(entry.path)


def waiting_in(folder: Path) -> list[tuple[UpdateManifest, Entry]]:
    """Return the finished updates in the folder of a spool, which its agent may use; nothing is removed."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # it is written or deleted just now
            _, entry = _read_folder(path) if path.is_dir() else _read(path)
            found.append((parse_update(entry.manifest), entry))
    return found


def _key(manifest: UpdateManifest) -> Key:
    return ("round", manifest.run_id, manifest.round_id)


def plain_name(run_id: RunId) -> str:
    """Return the prefix of a run's file names: its id, or a hash if the id might lead out of the folder."""
    if _PLAIN.fullmatch(run_id) is None:
        return "run." + hashlib.sha256(run_id.encode()).hexdigest()[:32]
    return run_id


def _name(manifest: UpdateManifest) -> str:
    return f"{plain_name(manifest.run_id)}.{manifest.round_id}{SUFFIX}"


def _folder_name(manifest: UpdateManifest) -> str:
    return f"{plain_name(manifest.run_id)}.{manifest.round_id}{FOLDER_SUFFIX}"


def _part_in(folder: Path, part: PartManifest) -> EntryPart:
    return EntryPart(folder / part_name(part.index), part.encode(), part.num_bytes)


def _document(entry: Entry) -> dict[str, Any]:
    return {
        "manifest": entry.manifest.decode("ascii"),
        "data_start": entry.data_start,
        "statistics": entry.statistics,
        **asdict(entry.costs),
        "rank": entry.rank,
        "spreads": entry.spreads,
        "terms": entry.terms,
        "run_number": entry.run_number,
    }


def _trailer(entry: Entry) -> bytes:
    body = json.dumps(_document(entry)).encode()
    return body + hashlib.sha256(body).digest() + len(body).to_bytes(8, "little") + MAGIC


def _read_all(folder: Path) -> Iterator[tuple[Key, Entry]]:
    for path in sorted(folder.iterdir()):
        try:
            yield _read_folder(path) if path.is_dir() else _read(path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s is not a whole update and is removed: %s", path, error)
            remove(path)


def _read(path: Path) -> tuple[Key, Entry]:
    """Read an entry back; raises ValueError, KeyError, TypeError or AttributeError for a foreign file."""
    if path.suffix != SUFFIX:
        raise ValueError(f"its name does not end with {SUFFIX}")
    document, begin = _document_in(path)
    entry, manifest = _entry(path, document)
    if path.name != _name(manifest) or manifest.parts or entry.data_start + manifest.num_bytes != begin:
        raise ValueError("its name or length does not match its manifest")
    return _key(manifest), entry


def _document_in(path: Path) -> tuple[Mapping[str, Any], int]:
    """Return the JSON at the end of a file, and its offset; raises ValueError if it is incomplete."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        foot = os.pread(file.fileno(), _FOOT_BYTES, max(0, size - _FOOT_BYTES))
        length, magic = int.from_bytes(foot[:8], "little"), foot[8:]
        sum_bytes = _SUM_BYTES if magic == MAGIC else 0
        begin = size - _FOOT_BYTES - sum_bytes - length
        if magic not in (MAGIC, MAGIC_BEFORE) or begin < 0:
            raise ValueError("its end is missing")
        body = os.pread(file.fileno(), length, begin)
        written = os.pread(file.fileno(), sum_bytes, begin + length)
    if sum_bytes and hashlib.sha256(body).digest() != written:
        raise ValueError("the SHA-256 of its manifest and measurements differs from the one written")
    document: Mapping[str, Any] = json.loads(body)
    return document, begin


def _read_folder(path: Path) -> tuple[Key, Entry]:
    """Read an entry of several parts back; raises the errors of `_read`."""
    if not (path / ROOT).is_file():
        raise ValueError(f"it has no {ROOT}")
    entry, manifest = _entry(path, _root_of(path / ROOT))
    parts: list[EntryPart] = []
    for index in range(len(manifest.parts)):
        data = path / part_name(index)
        encoded = data.with_name(f"{data.name}.json")
        if not (data.is_file() and encoded.is_file()):
            raise ValueError(f"part {index} is missing")
        part = part_of(manifest, encoded.read_bytes())
        if part is None or part.index != index or data.stat().st_size != part.num_bytes:
            raise ValueError(f"part {index} does not match its manifest")
        parts.append(_part_in(path, part))
    if path.name != _folder_name(manifest) or not parts:
        raise ValueError("its name does not match its manifest")
    return _key(manifest), replace(entry, parts=tuple(parts))


def _root_of(path: Path) -> Mapping[str, Any]:
    """Return the root document of an update in parts; an earlier program wrote it as plain JSON."""
    if (content := path.read_bytes()).endswith(b"}"):
        document: Mapping[str, Any] = json.loads(content)
        return document
    return _document_in(path)[0]


def _entry(path: Path, document: Mapping[str, Any]) -> tuple[Entry, UpdateManifest]:
    encoded = document["manifest"].encode("ascii")
    manifest = parse_update(encoded)
    entry = Entry(
        path=path,
        manifest=encoded,
        digest=digest_of(encoded),
        data_start=int(document["data_start"]),
        num_bytes=manifest.num_bytes,
        statistics={name: tuple(map(float, sums)) for name, sums in document["statistics"].items()},
        costs=Costs(
            download_seconds=float(document["download_seconds"]),
            train_seconds=float(document["train_seconds"]),
            mesh=MeshUse.read(**document["mesh"]) if document.get("mesh") else None,
            steps=int(document.get("steps", 0)),
        ),
        rank=int(document.get("rank", 0)),
        spreads=bool(document.get("spreads", False)),
        terms=str(document.get("terms", "")),
        run_number=int(document.get("run_number", 0)),
    )
    return entry, manifest

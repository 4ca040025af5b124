"""The files that the journal of a state directory refers to, and the check that they exist and are undamaged.

Each accepted update whose bytes are not in the journal has a file. So do the global model and each version that a
decision may still need.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, select

from atoll.aggregation.file_digest import sha256_of_next
from atoll.aggregation.tensors.safetensors_file import TensorFileCorrupted, parse_header
from atoll.aggregation.updates.inspection import inspect
from atoll.protocol.manifest import UpdateManifest, digest_of, parse_update, parse_version
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.strict_json import ManifestError
from atoll.protocol.vocabulary import Digest, RoundId, RunId, RunState, Version
from atoll.server.errors import StoreCorrupted
from atoll.server.files.part_files import PartFiles, file_stem
from atoll.server.hosting.keep import Keep
from atoll.server.journal.codec import StoredUpdateMeta, decode_meta
from atoll.server.journal.exchanges import recover_exchanges, replay_exchanges
from atoll.server.journal.holder import run_folder
from atoll.server.journal.journal import RunRow, run_rows
from atoll.server.journal.placement import num_ranks_of, state_of_rank
from atoll.server.journal.recovery import recover
from atoll.server.journal.schema import UPDATES, VERSIONS, check_version
from atoll.server.journal.sqlite import SqliteDatabase


@dataclass(frozen=True, slots=True)
class Need:
    """A run after the last entry of its journal, and the files that it needs."""

    run_id: RunId
    state: RunState
    version: Version
    next_round: RoundId
    digests: dict[Version, Digest]
    """The needed versions with their digests; an empty digest is unknown yet."""
    updates: dict[Digest, StoredUpdateMeta]
    """The needed accepted updates whose bytes are in files."""
    contents: frozenset[Digest] = frozenset()
    """The contents of messages whose exchanges are open."""


def needs_of(path: Path) -> list[Need]:
    """Return the needs of all runs of a state directory with an SQLite journal, at one instant.

    Raises:
        StoreCorrupted: the journal cannot be replayed.
        StateUnusable: the journal cannot be opened, or has no schema of Atoll.
    """
    database = SqliteDatabase(path / "state.db", read_only=True)
    with database.transaction() as connection:
        check_version(connection, path)
        return [_need(connection, row) for row in run_rows(connection)]


def _need(connection: Connection, row: RunRow) -> Need:
    if row.config.is_of_messages:
        return _need_of_messages(connection, row)
    machine = recover(connection, row.run_id).replay(row.rules)
    keep = Keep.after(0, machine, row.config.round)
    rows = connection.execute(select(VERSIONS).where(VERSIONS.c.run_id == row.run_id))
    wanted = {Version(0), keep.version, *keep.versions}
    digests = {Version(0): Digest("")}  # the journal has no digest of it before the run begins
    digests |= {Version(v.version): Digest(v.digest) for v in rows if v.version in wanted}
    of_run = select(UPDATES.c.digest, UPDATES.c.meta).where(UPDATES.c.run_id == row.run_id, UPDATES.c.data.is_(None))
    where = f"run {row.run_id}, update"
    updates = {
        Digest(digest): decode_meta(meta, where=f"{where} {digest}")
        for digest, meta in connection.execute(of_run)
        if digest in keep.updates
    }
    ledger = machine.ledger
    return Need(row.run_id, ledger.state, ledger.version, ledger.next_round, digests, updates)


def _need_of_messages(connection: Connection, row: RunRow) -> Need:
    """Return the needs of a run of messages: every reply that is kept, for its program may begin again, and more."""
    of_run = select(UPDATES.c.digest, UPDATES.c.meta).where(UPDATES.c.run_id == row.run_id, UPDATES.c.data.is_(None))
    where = f"run {row.run_id}, reply"
    updates = {Digest(d): decode_meta(meta, where=f"{where} {d}") for d, meta in connection.execute(of_run)}
    ledger = replay_exchanges(recover_exchanges(connection, row.run_id), row.config.exchange_rules).ledger
    contents = frozenset(one.message.content for exchange in ledger.open.values() for one in exchange.sent)
    return Need(row.run_id, row.state, Version(0), RoundId(1), {}, updates, contents)


class RunFiles:
    """The paths of a run's files: in a state directory, or at aggregation ranks whose directories are inside of it."""

    def __init__(self, path: Path, run_id: RunId) -> None:
        self.folder = run_folder(path, run_id)
        self.num_ranks = num_ranks_of(self.folder)
        states = [state_of_rank(path, rank, self.num_ranks) for rank in range(self.num_ranks)]
        self.ranks = [run_folder(state, run_id) if state.is_dir() else None for state in states]

    def manifest(self, version: Version) -> Path:
        """Return the path of a version's manifest."""
        return self.folder / "versions" / f"{version:06d}.manifest.json"

    def tensors(self, version: Version) -> list[Path]:
        """Return the paths of a version's tensors: one file, or one for each rank on this machine."""
        name = f"{version:06d}.safetensors"
        folders = [self.folder] if not self.num_ranks or version == 0 else [rank for rank in self.ranks if rank]
        return [folder / "versions" / name for folder in folders]

    def content_files(self, digest: Digest) -> list[Path]:
        """Return the paths of the content of a message: its manifest and its tensors."""
        return [self.folder / "contents" / f"{digest}.{kind}" for kind in ("manifest.json", "safetensors")]

    def update(self, digest: Digest, rank: int, part: int | None = None) -> Path | None:
        """Return the path of an accepted update, or of a part of one; None: it is at a rank on another machine."""
        folder = self.ranks[rank] if self.num_ranks else self.folder
        return None if folder is None else folder / "updates" / f"{file_stem(digest, part)}.bin"

    def update_files(self, digest: Digest, meta: StoredUpdateMeta) -> list[Path]:
        """Return the paths of an accepted update's files on this machine: of each part its bytes and its findings."""
        if not (num_parts := _num_parts(meta)):
            file = self.update(digest, meta.rank)
            return [] if file is None else [file]
        ranks = meta.ranks or (meta.rank,) * num_parts
        files = (self.update(digest, rank, part) for part, rank in enumerate(ranks))
        found = [file for file in files if file is not None]
        return found + [file.with_suffix(".json") for file in found]

    def at_ranks(self, digest: Digest, meta: StoredUpdateMeta) -> Iterator[tuple[Path, tuple[int, ...] | None]]:
        """Yield each place of an accepted update on this machine, with the parts that lie there; None: all of it."""
        for rank in sorted(set(meta.ranks)) or [meta.rank]:
            if (file := self.update(digest, rank)) is not None:
                yield file, meta.parts_at(rank)


def lacking(path: Path, needs: list[Need]) -> list[Path]:
    """Return the files that the journal refers to and that do not exist, sorted."""
    wanted: list[Path | None] = []
    for need in needs:
        files = RunFiles(path, need.run_id)
        for version in need.digests:
            wanted += [files.manifest(version), *files.tensors(version)]
        for digest, meta in need.updates.items():
            wanted += files.update_files(digest, meta)
        for digest in need.contents:
            wanted += files.content_files(digest)
    return sorted(file for file in wanted if file is not None and not file.is_file())


def damaged(path: Path, needs: list[Need]) -> Iterator[str]:
    """Yield the faults of the files that the journal refers to; every byte is read and checked against its digest."""
    yield from (f"{file} is missing" for file in lacking(path, needs))
    for need in needs:
        files = RunFiles(path, need.run_id)
        for version, digest in need.digests.items():
            if files.manifest(version).is_file():
                yield from _damage_of_version(files, version, digest)
        for digest, meta in need.updates.items():
            for file, parts in files.at_ranks(digest, meta):
                yield from _damage_of_update(file, parts, digest, meta)


def _damage_of_version(files: RunFiles, version: Version, digest: Digest) -> Iterator[str]:
    encoded = files.manifest(version).read_bytes()
    if digest and digest_of(encoded) != digest:
        yield f"{files.manifest(version)} is not the manifest of version {version}"
        return
    [whole, *parts] = files.tensors(version) or [files.manifest(version)]
    if parts or (files.num_ranks and version) or not whole.is_file():
        return  # the ranks have the digests of their parts
    try:
        _, position = parse_header(whole)
        with whole.open("rb") as file:
            file.seek(position)
            for piece in parse_version(encoded).pieces:
                if sha256_of_next(file, piece.num_bytes) != piece.sha256:
                    yield f"{whole}: tensor {piece.tensor} does not have the SHA-256 of its manifest"
    except (TensorFileCorrupted, ManifestError, EOFError) as error:
        yield f"{whole}: {error}"


def _damage_of_update(
    file: Path, here: tuple[int, ...] | None, digest: Digest, meta: StoredUpdateMeta
) -> Iterator[str]:
    try:
        manifest = parse_update(meta.manifest)
    except ManifestError as error:
        yield f"{file}: its manifest: {error}"
        return
    if not manifest.parts:
        yield from _damage_of_bytes(file, manifest) if file.is_file() else ()
        return
    parts = PartFiles(file.parent, file.parent, manifest, digest)
    for index in range(len(manifest.parts)) if here is None else here:
        if not all(path.is_file() for path in parts.paths(file.parent, index)):
            continue  # named as missing
        try:
            for data, part in parts.pieces([index]):
                yield from _damage_of_bytes(data, part)
        except StoreCorrupted as error:
            yield str(error)


def _num_parts(meta: StoredUpdateMeta) -> int:
    """Return the number of an update's parts; 0 when it has none, or when its manifest is damaged."""
    try:
        return len(parse_update(meta.manifest).parts)
    except ManifestError:
        return 0


def _damage_of_bytes(file: Path, manifest: UpdateManifest | PartManifest) -> Iterator[str]:
    is_whole = file.stat().st_size == manifest.num_bytes
    if not is_whole or inspect(file, manifest.pieces).wrong_digests:
        yield f"{file}: its bytes are not those of its manifest"

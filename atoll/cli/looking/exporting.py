"""Takes a version of a model away, as one safetensors file: from the directory here, or from a coordinator elsewhere.

Every tensor is checked against the version's manifest, and the file appears only when all of them are right.
"""

import asyncio
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atoll.aggregation.tensors.layout import CONTROL
from atoll.aggregation.tensors.safetensors_file import TensorFileWriter, parse_header, read_metadata
from atoll.aggregation.tensors.safetensors_header import header_bytes
from atoll.cli.audit_entries import write_down
from atoll.cli.faults import CommandError
from atoll.cli.looking import admin
from atoll.cli.looking.viewing import look
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import COORDINATOR
from atoll.protocol.manifest import VersionManifest, digest_of, parse_version
from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.protocol.wire.bulk_messages import coordinator_stub
from atoll.server.audit.actions import Action
from atoll.server.files.run_store import RunStore
from atoll.server.journal.placement import num_ranks_of, state_of_rank
from atoll.server.journal.state_directory import run_folder, running_coordinator
from atoll.server.ranks.fetch import fetch_into, fetch_manifest, gather
from atoll.server.views.history import History
from atoll.server.views.views import newest_version, run_of

BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Exported:
    """What was taken away, and where it is."""

    run: RunId
    version: Version
    digest: Digest
    out: Path
    num_bytes: int
    """Of the file."""


def from_here(history: History, run: str, version: int | None, out: Path) -> Exported:
    """A version of the run with this id or name (empty: the newest run); None: its newest version.

    Raises:
        CommandError: it is not kept, or damaged; or `out` is no place for a file.
        LookupError: there is no such run.
        OSError: the disk; or an aggregation rank that has a part of it is away.
    """
    _insist_on_place(out)
    row = run_of(history, run)
    place = _Place(history, row.run_id)
    chosen = Version(newest_version(history, row.run_id) if version is None else version)
    recorded = {known.version: known.digest for known in history.versions(row.run_id)}.get(chosen)
    store = place.store
    try:
        encoded = store.read_manifest(chosen)
    except FileNotFoundError as error:
        raise _not_kept(chosen, store.versions()) from error
    digest = digest_of(encoded)
    if recorded not in (None, digest):
        raise CommandError(f"{store.manifest_path(chosen)} is damaged: its digest is not {recorded}")
    manifest, path, gathered = parse_version(encoded), store.version_path(chosen), _beside(out, "gathered")
    try:
        if place.num_ranks and not path.exists():
            place.gather(chosen, digest, manifest, gathered)
            path = gathered
        _copy(path, manifest, out)
    finally:
        gathered.unlink(missing_ok=True)
    write_down(history.path, Action.MODEL_EXPORT, f"{row.run_id} version {chosen}", digests={"model": digest})
    return Exported(row.run_id, chosen, digest, out, out.stat().st_size)


def from_elsewhere(state: Path, run: str, version: int | None, out: Path) -> Exported:
    """The same from the coordinator that `atoll join` has made somebody an owner or operator of.

    Raises:
        CommandError: nobody answers, it is not kept, or an auditor asks; or `out` is no place for a file.
        OSError: what came is not what was asked for; or the disk.
    """
    _insist_on_place(out)
    seen = look("versions", state, run=run)
    kept = {row["version"]: row for row in seen["rows"] if row["kept"]}
    chosen = Version(max((row["version"] for row in seen["rows"]), default=0) if version is None else version)
    if chosen not in kept:
        raise _not_kept(chosen, sorted(kept))
    run_id, digest, gathered = RunId(seen["run"]), Digest(kept[chosen]["digest"]), _beside(out, "gathered")
    dialer, place = admin.elsewhere()
    ranks = [row.address for row in admin.ranks(state).ranks]  # where there are some, the coordinator serves no version
    fetching = _fetch(dialer, place.address, ranks, run_id, digest, gathered, seen["metadata"])
    try:
        _copy(gathered, asyncio.run(fetching), out)
    finally:
        gathered.unlink(missing_ok=True)
    return Exported(run_id, chosen, digest, out, out.stat().st_size)


class _Place:
    """Where a run is kept, on this machine."""

    def __init__(self, history: History, run_id: RunId) -> None:
        folder = run_folder(history.path, run_id)
        self.state, self.run_id = history.path, run_id
        self.store, self.num_ranks = RunStore(folder), num_ranks_of(folder)

    def gather(self, version: Version, digest: str, manifest: VersionManifest, out: Path) -> None:
        """Put a version together from the parts at the ranks."""
        addresses = [""] * self.num_ranks
        if running_coordinator(self.state) is not None:
            here = [row.address for row in admin.ranks(self.state).ranks]
            addresses = here if len(here) == self.num_ranks else addresses
        name = self.store.version_path(version).name
        folders = [run_folder(state_of_rank(self.state, k, self.num_ranks), self.run_id) for k in range(self.num_ranks)]
        shards = [folder / "versions" / name for folder in folders]
        note = read_metadata(self.store.version_path(Version(0)))
        what = (self.run_id, Digest(digest), manifest, out, note)
        asyncio.run(gather(addresses, *what, dialer=admin.dialer(self.state), shards=shards))


async def _fetch(
    dialer: Dialer,
    address: str,
    ranks: Sequence[str],
    run_id: RunId,
    digest: Digest,
    out: Path,
    note: dict[str, str],
) -> VersionManifest:
    """A whole version over the wire, from the coordinator or, in parts, from its ranks; returns its manifest."""
    async with dialer.channel(address, COORDINATOR) as channel:
        stub = coordinator_stub(channel)
        _, manifest, _ = await fetch_manifest(stub, run_id, digest)
        if ranks:
            await gather(ranks, run_id, digest, manifest, out, note, dialer=dialer)
            return manifest
        with TensorFileWriter(out, manifest.layout, metadata=note, piece_bytes=manifest.piece_bytes) as writer:
            await fetch_into(writer, stub.Download, run_id, digest, manifest.pieces)
            writer.finish()
    return manifest


def _not_kept(version: int, kept: Iterable[int]) -> CommandError:
    known = ", ".join(map(str, kept)) or "none"
    return CommandError(f"version {version} is not kept, or not made yet (kept: {known}; see keep_versions)")


def _insist_on_place(out: Path) -> None:
    """A file can be made there, or be put in the place of the one that is there."""
    if out.is_dir():
        raise CommandError(f"{out} is a directory: name a file in it, such as {out / 'model.safetensors'}")
    if out.exists() and not out.is_file():
        raise CommandError(f"{out} is no regular file, which alone is replaced: name another")
    if not out.parent.is_dir():
        raise CommandError(f"{out} cannot be made: there is no directory {out.parent}")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise CommandError(f"{out} cannot be made: {out.parent} may not be written")


def _beside(out: Path, what: str) -> Path:
    """A name that no file of the user's has, nor of another export."""
    return out.with_name(f"{out.name}.{os.getpid()}.{what}")


def _copy(path: Path, manifest: VersionManifest, out: Path) -> None:
    """Copy the model's tensors block by block, without control variates, and check all of them."""
    layout, data_start = parse_header(path)
    if layout != manifest.layout:
        raise CommandError(f"{path} is damaged: its tensors are not those of its manifest")
    part = _beside(out, "part")
    try:
        with path.open("rb") as source, part.open("wb") as target:
            source.seek(data_start)
            model = (tensor for tensor in layout if not tensor.name.startswith(CONTROL))
            target.write(header_bytes(model, read_metadata(path)))
            _copy_checked(source, target, manifest, path)
            target.flush()
            os.fsync(target.fileno())
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)


def _copy_checked(source: BinaryIO, target: BinaryIO, manifest: VersionManifest, path: Path) -> None:
    for piece in manifest.pieces:
        digest = hashlib.sha256()
        for block in _blocks(source, piece.num_bytes):
            digest.update(block)
            if not piece.tensor.startswith(CONTROL):
                target.write(block)
        if digest.hexdigest() != piece.sha256:
            raise CommandError(f"{path} is damaged: tensor {piece.tensor} has not the SHA-256 of its manifest")


def _blocks(source: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    while num_bytes and (block := source.read(min(BLOCK_BYTES, num_bytes))):
        num_bytes -= len(block)
        yield block

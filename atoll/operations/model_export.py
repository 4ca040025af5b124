"""The export of a model version as one safetensors file, from a state directory or from a joined coordinator.

Every tensor is checked against the version's manifest; the file gets its name only after all tensors have passed.
"""

import asyncio
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from atoll.operations import admin, local_audit
from atoll.operations.faults import CommandError
from atoll.operations.place import is_elsewhere
from atoll.operations.reporter import Wait, waiting_for
from atoll.operations.views import open_history, read_view
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import COORDINATOR
from atoll.protocol.manifest import VersionManifest, digest_of, parse_version
from atoll.protocol.progress import OnBytes, not_told
from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.protocol.wire.bulk_messages import coordinator_stub
from atoll.server.audit.actions import Action
from atoll.server.files.run_store import RunStore
from atoll.server.journal.holder import run_folder, running_coordinator
from atoll.server.journal.placement import num_ranks_of, state_of_rank
from atoll.server.ranks.fetch import fetch_into, fetch_manifest, gather
from atoll.server.views.history import History
from atoll.server.views.views import note_of_privacy, run_of
from atoll.tensors.layout import BESIDE
from atoll.tensors.safetensors_file import TensorFileWriter, parse_header, read_metadata
from atoll.tensors.safetensors_header import header_bytes

BLOCK_BYTES = 2**20
"""Bytes that are copied and hashed at a time."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported version and its file."""

    run: RunId
    version: Version
    digest: Digest
    """Digest of the version's manifest."""
    out: Path
    num_bytes: int
    """Size of the file in bytes."""


def export(state: Path, run: str, version: int | None, out: Path, *, database: str = "") -> Exported:
    """Export a version from the state directory or the database or, without one, from the joined coordinator.

    Arguments and errors as in `export_local` and `export_remote`.
    """
    if not database and is_elsewhere(state):
        return export_remote(state, run, version, out)
    with open_history(state, database) as history, copying(out) as wait:
        return export_local(history, run, version, out, on_bytes=wait.advance)


def export_local(
    history: History, run: str, version: int | None, out: Path, *, on_bytes: OnBytes = not_told
) -> Exported:
    """Export a version from the state directory of a history.

    Args:
        history: the history of the state directory.
        run: id or name of the run; empty: the newest run.
        version: the version; None: the run's newest version.
        out: the file to write; an older one is replaced.
        on_bytes: called with the number of bytes that were copied since the last call, and of all.

    Raises:
        CommandError: the version is not kept, or it is damaged; or `out` cannot be a file.
        LookupError: no such run.
        OSError: the disk failed; or an aggregation rank with a part of the version is away.
    """
    check_place(out)
    row = run_of(history, run)
    local = _LocalRun(history, row.run_id)
    chosen = Version(history.newest_version(row.run_id) if version is None else version)
    recorded = {known.version: known.digest for known in history.versions(row.run_id)}.get(chosen)
    store = local.store
    try:
        encoded = store.read_manifest(chosen)
    except FileNotFoundError as error:
        raise _not_kept(chosen, store.versions()) from error
    digest = digest_of(encoded)
    if recorded not in (None, digest):
        raise CommandError(f"{store.manifest_path(chosen)} is damaged: its digest is not {recorded}")
    manifest, path, gathered = parse_version(encoded), store.version_path(chosen), _beside(out, "gathered")
    try:
        if local.num_ranks and not path.exists():
            local.gather(chosen, digest, manifest, gathered)
            path = gathered
        with local_audit.recorded(
            history.path, Action.MODEL_EXPORT, f"{row.run_id} version {chosen}", {"model": digest}
        ):
            _copy(path, manifest, out, on_bytes, note_of_privacy(history, row.run_id))
    finally:
        gathered.unlink(missing_ok=True)
    return Exported(row.run_id, chosen, digest, out, out.stat().st_size)


def export_remote(state: Path, run: str, version: int | None, out: Path) -> Exported:
    """Export a version from the joined coordinator, as an owner or operator; arguments as for `export_local`.

    Raises:
        CommandError: no answer; a refusal, as an auditor gets it; the version is not kept; or `out` cannot be a file.
        OSError: the bytes received are not those of the version; or the disk failed.
    """
    check_place(out)
    seen = read_view("versions", state, run=run)
    kept = {row["version"]: row for row in seen["rows"] if row["kept"]}
    chosen = Version(max((row["version"] for row in seen["rows"]), default=0) if version is None else version)
    if chosen not in kept:
        raise _not_kept(chosen, sorted(kept))
    run_id, digest, gathered = RunId(seen["run"]), Digest(kept[chosen]["digest"]), _beside(out, "gathered")
    dialer, place = admin.elsewhere()
    ranks = [row.address for row in admin.ranks(state).ranks]  # a coordinator with ranks serves no version itself
    fetching = _fetch(dialer, place.address, ranks, run_id, digest, gathered, seen["metadata"])
    try:
        with copying(out) as wait:
            _copy(gathered, asyncio.run(fetching), out, wait.advance, {})  # what was fetched has its metadata
    finally:
        gathered.unlink(missing_ok=True)
    return Exported(run_id, chosen, digest, out, out.stat().st_size)


def best_version(seen: dict[str, Any]) -> int:
    """Return the best version among the rows of a run's versions.

    Raises:
        CommandError: no metric decides, or it has had no value yet.
    """
    found = [int(row["version"]) for row in seen["rows"] if row.get("best")]
    if not found:
        raise CommandError(
            f"--best: run {seen['run']} has no best version yet: its setting model.best names no metric, or one "
            "that is not measured yet (`atoll run show` has both); name a version"
        )
    return found[0]


def copying(out: Path) -> AbstractContextManager[Wait]:
    """Print, when the block takes long, that a version is being copied."""
    return waiting_for(f"the bytes of {out}", "every tensor is read, checked and written")


class _LocalRun:
    """The files of a run on this machine."""

    def __init__(self, history: History, run_id: RunId) -> None:
        folder = run_folder(history.path, run_id)
        self.state, self.run_id = history.path, run_id
        self.store, self.num_ranks = RunStore(folder), num_ranks_of(folder)

    def gather(self, version: Version, digest: str, manifest: VersionManifest, out: Path) -> None:
        """Assemble a version from its parts: the files of ranks on this machine, or what other ranks send."""
        addresses = [""] * self.num_ranks
        if running_coordinator(self.state) is not None:
            current = [row.address for row in admin.ranks(self.state).ranks]
            addresses = current if len(current) == self.num_ranks else addresses
        name = self.store.version_path(version).name
        folders = [run_folder(state_of_rank(self.state, k, self.num_ranks), self.run_id) for k in range(self.num_ranks)]
        shards = [folder / "versions" / name for folder in folders]
        metadata = read_metadata(self.store.version_path(Version(0)))
        target = (self.run_id, Digest(digest), manifest, out, metadata)
        asyncio.run(gather(addresses, *target, dialer=admin.dialer(self.state), shards=shards))


async def _fetch(
    dialer: Dialer,
    address: str,
    ranks: Sequence[str],
    run_id: RunId,
    digest: Digest,
    out: Path,
    metadata: dict[str, str],
) -> VersionManifest:
    """Fetch a version from the coordinator, or its parts from the ranks, into one file; return its manifest."""
    async with dialer.channel(address, COORDINATOR) as channel:
        stub = coordinator_stub(channel)
        _, manifest, _ = await fetch_manifest(stub, run_id, digest)
        if ranks:
            await gather(ranks, run_id, digest, manifest, out, metadata, dialer=dialer)
            return manifest
        with TensorFileWriter(out, manifest.layout, metadata=metadata, piece_bytes=manifest.piece_bytes) as writer:
            await fetch_into(writer, stub.Download, run_id, digest, manifest.pieces)
            writer.finish()
    return manifest


def _not_kept(version: int, kept: Iterable[int]) -> CommandError:
    known = ", ".join(map(str, kept)) or "none"
    return CommandError(f"version {version} is not kept, or not made yet (kept: {known}; see keep_versions)")


def check_place(out: Path) -> None:
    """Check that `out` can be created, or is a model's file, the only kind that an export replaces.

    Raises:
        CommandError: `out` cannot be created, or is another kind of file.
    """
    if out.is_dir():
        raise CommandError(f"{out} is a directory: name a file in it, such as {out / 'model.safetensors'}")
    if out.exists() and not out.is_file():
        raise CommandError(f"{out} is not a regular file, and only a regular file is replaced: name another")
    if out.exists() and out.stat().st_size and not _is_model(out):
        raise CommandError(f"{out} is not a safetensors file, and only such a file is replaced: name another")
    if not out.parent.is_dir():
        raise CommandError(f"{out} cannot be created: there is no directory {out.parent}")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise CommandError(f"{out} cannot be created: {out.parent} is not writable")


def _is_model(file: Path) -> bool:
    try:
        parse_header(file)
    except (ValueError, OSError):
        return False
    return True


def _beside(out: Path, suffix: str) -> Path:
    """Return a path beside `out` that no other export uses: it contains the number of this process."""
    return out.with_name(f"{out.name}.{os.getpid()}.{suffix}")


def _copy(path: Path, manifest: VersionManifest, out: Path, on_bytes: OnBytes, note: dict[str, str]) -> None:
    """Copy the model's tensors to `out` and check every tensor of the file; control variates are left out.

    The metadata are those of the file with the entries of `note`.
    """
    layout, data_start = parse_header(path)
    if layout != manifest.layout:
        raise CommandError(f"{path} is damaged: its tensors are not those of its manifest")
    part = _beside(out, "part")
    try:
        with path.open("rb") as source, part.open("wb") as target:
            source.seek(data_start)
            model = (tensor for tensor in layout if not tensor.name.startswith(BESIDE))
            target.write(header_bytes(model, read_metadata(path) | note))
            _copy_checked(source, target, manifest, path, on_bytes)
            target.flush()
            os.fsync(target.fileno())
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)


def _copy_checked(source: BinaryIO, target: BinaryIO, manifest: VersionManifest, path: Path, on_bytes: OnBytes) -> None:
    for piece in manifest.pieces:
        digest = hashlib.sha256()
        for block in _blocks(source, piece.num_bytes):
            digest.update(block)
            on_bytes(len(block), manifest.num_bytes)
            if not piece.tensor.startswith(BESIDE):
                target.write(block)
        if digest.hexdigest() != piece.sha256:
            raise CommandError(f"{path} is damaged: the SHA-256 of tensor {piece.tensor} differs from its manifest")


def _blocks(source: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    while num_bytes and (block := source.read(min(BLOCK_BYTES, num_bytes))):
        num_bytes -= len(block)
        yield block

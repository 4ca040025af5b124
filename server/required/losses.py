"""The check that each file required by a journal exists undamaged: at a start, in a backup, in a restoration.

The sizes of all files immediately show missing or truncated ones. Their bytes are read as far as the caller requests:
damage that keeps the size is found before use in any case.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atoll.ground.printable import count_of
from atoll.ground.strict_json import ManifestError
from atoll.protocol.manifest import UpdateManifest, VersionManifest, digest_of, parse_update, parse_version
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.server.errors import StoreCorrupted
from atoll.server.files.part_files import PartFiles, read_findings
from atoll.server.journal.codec import StoredUpdateMeta
from atoll.server.journal.holder import is_held
from atoll.server.required.needs import Need, needs_of
from atoll.server.required.run_files import RunFiles, Shard
from atoll.tensors.layout import Piece
from atoll.tensors.safetensors_file import TensorFileCorrupted, parse_header
from atoll.tensors.updates.inspection import inspect

Reads = Literal["sizes", "model", "all"]
"""Bytes to read: none; only of the current versions of open runs; all."""

WAY_OUT = (
    "put these files back from a backup; or start once with --accept-losses, which continues without them, as each "
    "line says, and is recorded in the audit log"
)
"""Last line about losses, with the remedies."""

LINES_MAX = 40
"""Largest number of losses with a line each."""


@dataclass(frozen=True, slots=True)
class Loss:
    """File that a journal requires and that is missing or damaged."""

    run_id: RunId
    path: Path
    fault: str
    cost: str
    """Consequence of continuing without the file."""
    is_open: bool = True
    """Whether the run may continue by itself, and so relies on the file now."""
    updates: tuple[Digest, ...] = ()
    versions: tuple[Version, ...] = ()
    contents: tuple[Digest, ...] = ()

    def __str__(self) -> str:
        return f"run {self.run_id}: {self.path} {self.fault}: {self.cost}"


def lines_of(losses: Iterable[Loss]) -> list[str]:
    """Return a line for each loss, up to `LINES_MAX`, and the number of the others."""
    lines = [str(loss) for loss in losses]
    more = len(lines) - LINES_MAX
    return [*lines[:LINES_MAX], f"and {count_of(more, 'further file')}"] if more > 0 else lines


def losses_in(path: Path, database: str = "") -> list[Loss]:
    """Return missing or damaged files of a state directory, reading every byte; its coordinator may be running.

    In this case files may be deleted during the check. So a file counts as lost only if a second check confirms it.

    Args:
        path: the state directory.
        database: the URL of its journal; empty: the URL that the directory names.

    Raises:
        StoreCorrupted: the journal cannot be replayed.
        StateUnusable: the journal cannot be opened.
    """
    found = losses_of(path, needs_of(path, database), reads="all")
    if not found or not is_held(path):
        return found
    before = {loss.path for loss in found}
    return [loss for loss in losses_of(path, needs_of(path, database), reads="all") if loss.path in before]


def losses_of(path: Path, needs: Iterable[Need], *, reads: Reads) -> list[Loss]:
    """Return the files that are missing or damaged, sorted by run.

    Args:
        path: the state directory, or the folder of a backup.
        needs: the files that the journal requires.
        reads: the bytes to compare with their digests.
    """
    return [loss for need in needs for loss in _losses(RunFiles(path, need.run_id), need, reads)]


def _losses(files: RunFiles, need: Need, reads: Reads) -> Iterator[Loss]:
    for version, digest in sorted(need.digests.items()):
        is_read = reads == "all" or (reads == "model" and need.is_open and version == need.version)
        cost, anchored = _cost_of_version(need, version), need.anchored.get(version, ())
        for file, fault in _faults_of_version(files, need, version, digest, is_read=is_read):
            yield Loss(need.run_id, file, fault, cost, need.is_open, anchored, (version,))
    for digest, meta in need.updates.items():
        for file, fault in _faults_of_update(files, digest, meta, is_read=reads == "all"):
            yield Loss(need.run_id, file, fault, _cost_of_update(need, digest), need.is_open, (digest,))
    for digest in sorted(need.contents):
        for file, fault in _faults_of_content(files.content_files(digest), is_read=reads == "all"):
            cost = "the nodes that have not answered yet do not get this message, and its program is told so"
            yield Loss(need.run_id, file, fault, cost, need.is_open, contents=(digest,))


# ---------------------------------------------------------------- what it costs


def _cost_of_version(need: Need, version: Version) -> str:
    if not need.is_open:
        return f"the run is {need.state}, and can be neither resumed nor exported from it"
    if version in (0, need.version):
        what = "the global model" if version else "version 0, which every fold reads"
        return f"it is {what}: the run fails; `atoll model export --version` still exports the others"
    if version == need.best:
        return f"it is version {version}, the best so far: a later one replaces it"
    lost = need.anchored.get(version, ())
    also = f", and {count_of(len(lost), 'accepted update')} that build on it end" if lost else ""
    return f"it is version {version}: what was trained from it, or waits for its evaluation, continues without it{also}"


def _cost_of_update(need: Need, digest: Digest) -> str:
    if (sender := need.senders.get(digest)) is None:
        return "it is a reply that the program has read: the run fails, as the program cannot be repeated"
    client_id, number = sender
    if need.is_of_messages:
        return f"it is the reply of {client_id} to message {number}, which then has none"
    return f"it is the accepted update of {client_id} in round {number}, which continues if its quorum allows"


# ---------------------------------------------------------------- versions


def _faults_of_version(
    files: RunFiles, need: Need, version: Version, digest: Digest, *, is_read: bool
) -> Iterator[tuple[Path, str]]:
    path = files.versions.manifest_path(version)
    try:
        encoded = path.read_bytes()
        manifest = parse_version(encoded)
    except FileNotFoundError:
        yield path, "is missing"
        manifest = None
    except ManifestError as error:
        yield path, f"is damaged ({error})"
        return
    else:
        if digest and digest_of(encoded) != digest:
            yield path, f"is not the manifest of version {version} in the journal"
            return
    if manifest is None:
        whole = files.versions.version_path(version)
        if (not files.num_ranks or version == 0) and not whole.is_file():
            yield whole, "is missing"
        return
    for shard in files.shards(version, manifest):
        yield from _faults_of_tensors(shard, is_read=is_read)
    for slot in need.slots if version == need.version else ():
        for of_slot, tensors in files.slot_files(version, slot):
            yield from _faults_of_slot(of_slot, tensors, is_read=is_read and not files.num_ranks)


def _faults_of_tensors(shard: Shard, *, is_read: bool) -> Iterator[tuple[Path, str]]:
    try:
        _, start = parse_header(shard.path)
        wrong_size = [*_faults_of_size(shard.path, start + sum(piece.num_bytes for piece in shard.pieces))]
        yield from wrong_size
        if is_read and not wrong_size:
            yield from _faults_of_bytes(shard.path, shard.pieces, start)
    except FileNotFoundError:
        yield shard.path, "is missing"
    except (TensorFileCorrupted, EOFError) as error:
        yield shard.path, f"is damaged ({_without(shard.path, error)})"


def _faults_of_slot(manifest: Path, tensors: Path, *, is_read: bool) -> Iterator[tuple[Path, str]]:
    """Yield the faults of a server optimizer's slot; at a rank its manifest lists digests, checked before use."""
    yield from ((path, "is missing") for path in (manifest, tensors) if not path.is_file())
    if not (manifest.is_file() and tensors.is_file()):
        return
    if not is_read:
        yield from _faults_of_tensors_alone(tensors)
        return
    try:
        yield from _faults_of_tensors(Shard(tensors, parse_version(manifest.read_bytes()).pieces), is_read=True)
    except ManifestError as error:
        yield manifest, f"is damaged ({error})"


def _faults_of_tensors_alone(path: Path) -> Iterator[tuple[Path, str]]:
    try:
        parse_header(path)
    except (TensorFileCorrupted, EOFError) as error:
        yield path, f"is damaged ({_without(path, error)})"


def _without(path: Path, error: Exception) -> str:
    return str(error).removeprefix(f"{path}: ")


def _faults_of_size(path: Path, num_bytes: int) -> Iterator[tuple[Path, str]]:
    if (found := path.stat().st_size) != num_bytes:
        yield path, f"has {count_of(found, 'byte')}, not {num_bytes}"


def _faults_of_bytes(path: Path, pieces: tuple[Piece, ...], start: int = 0) -> Iterator[tuple[Path, str]]:
    if wrong := inspect(path, pieces, data_start=start).wrong_digests:
        yield path, f"is damaged (tensor {wrong[0].tensor!r} does not have the SHA-256 of its manifest)"


def _faults_of_content(paths: tuple[Path, Path], *, is_read: bool) -> Iterator[tuple[Path, str]]:
    manifest, tensors = paths
    yield from ((path, "is missing") for path in paths if not path.is_file())
    if manifest.is_file() and tensors.is_file():
        try:
            found: VersionManifest = parse_version(manifest.read_bytes())
            yield from _faults_of_tensors(Shard(tensors, found.pieces), is_read=is_read)
        except ManifestError as error:
            yield manifest, f"is damaged ({error})"


# ---------------------------------------------------------------- updates


def _faults_of_update(
    files: RunFiles, digest: Digest, meta: StoredUpdateMeta, *, is_read: bool
) -> Iterator[tuple[Path, str]]:
    for file, here in files.at_ranks(digest, meta):
        try:
            manifest = parse_update(meta.manifest)
        except ManifestError as error:
            yield file, f"has a damaged manifest in the journal ({error})"
            return
        if manifest.parts:
            parts = PartFiles(file.parent, file.parent, manifest, digest)
            for index in range(len(manifest.parts)) if here is None else here:
                yield from _faults_of_part(parts, manifest, index, file.parent, is_read=is_read)
        else:
            yield from _faults_of_file(file, manifest.num_bytes, manifest, is_read=is_read)


def _faults_of_part(
    parts: PartFiles, root: UpdateManifest, index: int, folder: Path, *, is_read: bool
) -> Iterator[tuple[Path, str]]:
    data, findings = parts.paths(folder, index)
    listed = root.parts[index]
    try:
        part, _ = read_findings(findings, listed)
    except StoreCorrupted as error:
        is_there = findings.is_file()
        yield findings, f"is damaged ({_without(findings, error)})" if is_there else "is missing"
        yield from _faults_of_file(data, listed.num_bytes, None, is_read=False)
        return
    yield from _faults_of_file(data, listed.num_bytes, part, is_read=is_read)


def _faults_of_file(
    path: Path, num_bytes: int, manifest: UpdateManifest | PartManifest | None, *, is_read: bool
) -> Iterator[tuple[Path, str]]:
    if not path.is_file():
        yield path, "is missing"
        return
    wrong_size = [*_faults_of_size(path, num_bytes)]
    yield from wrong_size
    if is_read and manifest is not None and not wrong_size:
        yield from _faults_of_bytes(path, manifest.pieces)

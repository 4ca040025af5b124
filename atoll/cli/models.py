"""`atoll model ...`: the versions of the global model, and how to take one away."""

import asyncio
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from atoll.cli import options
from atoll.cli.faults import CommandError, Commands
from atoll.cli.looking import history_of, in_words, look
from atoll.cli.printing import as_json, clock, say, size, table
from atoll.cli.writing_down import write_down

if TYPE_CHECKING:
    from atoll.protocol.manifest import VersionManifest
    from atoll.protocol.vocabulary import RunId, Version
    from atoll.server.history import History

app = typer.Typer(cls=Commands, no_args_is_help=True, help="The versions of the global model.")

BLOCK_BYTES = 2**20

Number = Annotated[
    int | None, typer.Argument(metavar="[VERSION]", min=0, help="Which version; by default the newest one.")
]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the safetensors file is to appear.")]


@app.command("list")
def list_versions(
    run: options.Run = "",
    state: options.State = options.STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """List the versions of a run's model: what each is worth, and whether it is still kept, perhaps in parts at the
    aggregation ranks.
    """
    seen = look("versions", state, database, run=run)
    if json:
        as_json(seen["rows"])
        return
    table(
        ["version", "metrics", "size", "kept", "created", "digest"],
        [
            (
                *(found["version"], in_words(found["metrics"]), size(found["num_bytes"])),
                *(_kept_in_words(found), clock(found["created_at"]), found["digest"][:12]),
            )
            for found in seen["rows"]
        ],
        empty=f"run {seen['run']} has no version yet",
    )


@app.command()
def export(
    out: Out,
    version: Number = None,
    run: options.Run = "",
    state: options.State = options.STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """Copy a version to a safetensors file; every tensor is checked against the version's manifest on the way.

    Control variates (SCAFFOLD's), which are no part of the model, stay behind. A version that lies in parts at
    aggregation ranks is put together: from the directories of the ranks that this coordinator has started, and over the
    wire from the others, for which the coordinator must run.
    """
    from atoll.protocol.vocabulary import Version
    from atoll.server.audit.actions import Action
    from atoll.server.views import newest_version, run_of

    with history_of(state, database) as history:
        row = run_of(history, run)
        chosen = Version(newest_version(history, row.run_id) if version is None else version)
        recorded = {known.version: known.digest for known in history.versions(row.run_id)}
        digest, num_bytes = _copy(_Place(history, row.run_id), chosen, recorded.get(chosen), out)
    write_down(state, Action.MODEL_EXPORT, f"{row.run_id} version {chosen}", digests={"model": digest})
    if json:
        as_json({"run": row.run_id, "version": chosen, "digest": digest, "out": out, "num_bytes": num_bytes})
    else:
        say(f"version {chosen} of {row.run_id} is in {out} ({size(num_bytes)}, digest {digest[:12]})")


def _kept_in_words(version: dict[str, Any]) -> str:
    if not version["kept"]:
        return "no"
    return "yes" if version["parts"] == 1 else f"in {version['parts']} parts"


class _Place:
    """Where a run is kept."""

    def __init__(self, history: "History", run_id: "RunId") -> None:
        from atoll.server.placement import num_ranks_of
        from atoll.server.statedir import run_folder
        from atoll.server.store import RunStore

        folder = run_folder(history.path, run_id)
        self.state, self.run_id = history.path, run_id
        self.store, self.num_ranks = RunStore(folder), num_ranks_of(folder)

    def gather(self, version: "Version", digest: str, manifest: "VersionManifest", out: Path) -> None:
        """Put a version together from the parts at the ranks."""
        from atoll.aggregation.tensorfile import read_metadata
        from atoll.cli import admin
        from atoll.protocol.vocabulary import Digest, Version
        from atoll.server.gather import gather
        from atoll.server.placement import state_of_rank
        from atoll.server.statedir import run_folder, running_coordinator

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


def _copy(place: _Place, version: "Version", recorded: str | None, out: Path) -> tuple[str, int]:
    """Copy the file block by block, hash every tensor, and let it appear only when all of them are right.

    One that lies in parts at aggregation ranks is put together first.

    Returns:
        The version's digest, and the size of the file [bytes].
    """
    from atoll.aggregation.layout import CONTROL
    from atoll.aggregation.tensorfile import parse_header, read_metadata
    from atoll.aggregation.tensorheader import header_bytes
    from atoll.protocol.manifest import digest_of, parse_version

    store = place.store
    try:
        encoded = store.read_manifest(version)
    except FileNotFoundError as error:
        kept = ", ".join(map(str, store.versions())) or "none"
        raise CommandError(
            f"version {version} is not kept, or not made yet (kept: {kept}; see keep_versions)"
        ) from error
    digest = digest_of(encoded)
    if recorded not in (None, digest):
        raise CommandError(f"{store.manifest_path(version)} is damaged: its digest is not {recorded}")
    manifest, path = parse_version(encoded), store.version_path(version)
    gathered, part = out.with_name(out.name + ".gathered"), out.with_name(out.name + ".part")
    try:
        if place.num_ranks and not path.exists():
            place.gather(version, digest, manifest, gathered)
            path = gathered
        layout, data_start = parse_header(path)
        if layout != manifest.layout:
            raise CommandError(f"{path} is damaged: its tensors are not those of its manifest")
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
        gathered.unlink(missing_ok=True)
    return digest, out.stat().st_size


def _copy_checked(source: BinaryIO, target: BinaryIO, manifest: "VersionManifest", path: Path) -> None:
    from atoll.aggregation.layout import CONTROL

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

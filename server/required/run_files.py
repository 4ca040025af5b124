"""The paths of a run's files: in a state directory, or at aggregation ranks whose directories are inside it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.manifest import VersionManifest
from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.server.files.part_files import file_stem
from atoll.server.files.version_folder import VersionFolder
from atoll.server.journal.codec import StoredUpdateMeta
from atoll.server.journal.holder import run_folder
from atoll.server.journal.placement import num_ranks_of, state_of_rank
from atoll.tensors.layout import Piece
from atoll.tensors.ownership import owned_pieces


@dataclass(frozen=True, slots=True)
class Shard:
    """File of a version, or of a rank's pieces of it."""

    path: Path
    pieces: tuple[Piece, ...]


class RunFiles:
    """Paths of a run's files on this machine.

    Args:
        path: the state directory of the coordinator.
        run_id: the run.
    """

    def __init__(self, path: Path, run_id: RunId) -> None:
        self.folder = run_folder(path, run_id)
        self.versions = VersionFolder(self.folder)
        self.num_ranks = num_ranks_of(self.folder)
        states = [state_of_rank(path, rank, self.num_ranks) for rank in range(self.num_ranks)]
        self.ranks = [run_folder(state, run_id) if state.is_dir() else None for state in states]

    def shards(self, version: Version, manifest: VersionManifest) -> list[Shard]:
        """Return the files of a version's tensors: one, or one for each rank on this machine that has pieces of it."""
        if not self.num_ranks or version == 0:
            return [Shard(self.versions.version_path(version), manifest.pieces)]
        owned = [owned_pieces(manifest.pieces, rank, self.num_ranks) for rank in range(self.num_ranks)]
        return [
            Shard(VersionFolder(folder).version_path(version), pieces)
            for folder, pieces in zip(self.ranks, owned, strict=True)
            if folder is not None and pieces
        ]

    def slot_files(self, version: Version, slot: str) -> list[tuple[Path, Path]]:
        """Return manifest and tensors of a slot of the server optimizer: one pair, or one for each rank here."""
        folders = [rank for rank in self.ranks if rank is not None] if self.num_ranks else [self.folder]
        each = map(VersionFolder, folders)
        return [(folder.manifest_path(version, slot), folder.version_path(version, slot)) for folder in each]

    def content_files(self, digest: Digest) -> tuple[Path, Path]:
        """Return the paths of the content of a message: its manifest and its tensors."""
        folder = self.folder / "contents"
        return folder / f"{digest}.manifest.json", folder / f"{digest}.safetensors"

    def update(self, digest: Digest, rank: int, part: int | None = None) -> Path | None:
        """Return the path of an accepted update, or of one of its parts; None: it is at a rank on another machine."""
        folder = self.ranks[rank] if self.num_ranks else self.folder
        return None if folder is None else folder / "updates" / f"{file_stem(digest, part)}.bin"

    def at_ranks(self, digest: Digest, meta: StoredUpdateMeta) -> Iterator[tuple[Path, tuple[int, ...] | None]]:
        """Yield each location of an accepted update on this machine, with the parts there; None: all of it."""
        for rank in sorted(set(meta.ranks)) or [meta.rank]:
            if (file := self.update(digest, rank)) is not None:
                yield file, meta.parts_at(rank)

"""The versions of a simulated run's model: made from the updates of a round, read by whoever trains or measures.

Updates that lie as rows are folded where they are (`aggregation.stacked`), all others by the coordinator's own fold;
the bits are the same. The newest versions of rows lie in memory, and become files when an interrupted run would need
them, or when they have to stay for longer: of small models there are hundreds a second, and hardly one is asked for.
"""

import time
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from atoll.aggregation.fold.step import Step
from atoll.aggregation.stacked.rows import Rows, can_stack, fold_rows
from atoll.aggregation.tensors import safetensors_file
from atoll.aggregation.tensors.layout import Layout
from atoll.aggregation.tensors.pieces import layout_of_pieces
from atoll.parallel.task.arrays import Arrays
from atoll.parallel.worker.bench import Bench
from atoll.parallel.worker.model_files import write_initial
from atoll.protocol.manifest import VersionManifest, digest_of
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.config.run import RunConfig
from atoll.server.errors import StoreCorrupted
from atoll.server.files.run_store import RunStore
from atoll.server.files.versions import VersionFile, Versions, version_file
from atoll.server.folding.method import Method
from atoll.server.folding.plan import plan_of, trained_of, weights_and_factors
from atoll.server.folding.reducer import fold_version
from atoll.server.hosting.retention import Keep
from atoll.server.rounds.events import Aggregate
from atoll.simulations.federation.updates import IN_MEMORY_MAX, Updates

KEEP_VERSIONS = 5
CACHED_MAX = 3
"""Versions in memory, the newest ones."""

GARBAGE_EVERY_S = 1.0


class _Unwritten(NamedTuple):
    """A version that is no file yet."""

    described: VersionFile
    arrays: Arrays
    slots: Arrays


class Models(Versions):
    """See the module docstring.

    Args:
        folder: of the files.
        config: of the run.
        bench: of the task; it makes version 0.
        threads: for a fold of files.
        keep: of a run that is gone on with; None: it begins, with a version 0 of its own.

    Raises:
        StoreCorrupted: the version that the run goes on with is not there, or damaged.
    """

    def __init__(self, folder: Path, config: RunConfig, bench: Bench, threads: int, keep: Keep | None = None) -> None:
        super().__init__(RunStore(folder, is_durable=False))
        self._config, self._threads = config, threads
        self._settings = (config.aggregation, config.optimizer)
        self.method = Method.of(*self._settings)
        self._arrays: dict[Digest, Arrays] = {}
        self._slots: dict[Version, Arrays] = {}
        self._unwritten: dict[Version, _Unwritten] = {}  # of the newest ones those that are no files yet, oldest first
        self._saved = _needed(keep) if keep else frozenset[Version]()  # that an interrupted run would go on with
        self._collected_at = 0.0
        self.store.drop_versions_after(keep.version if keep else Version(-1))  # a killed process was further
        if keep is None:
            pieces = write_initial(self.store.version_path(Version(0)), bench, config.seed)
            self.store.write_manifest(Version(0), VersionManifest.of(pieces).encode())
        else:
            self._look_at(Version(0), keep.version)

    def _look_at(self, *versions: Version) -> None:
        """Whether they are as they were written, and the last one has its slots."""
        for version in versions:
            path = self.store.version_path(version)
            try:
                manifest = self.version(version).manifest
                if (
                    safetensors_file.pieces_of(manifest.layout, safetensors_file.read(path), manifest.piece_bytes)
                    != manifest.pieces
                ):
                    raise StoreCorrupted("its bytes are not those of its manifest")
                if version == versions[-1]:
                    self._slots_of(version)
            except (OSError, ValueError, KeyError) as error:
                raise StoreCorrupted(
                    f"{path}: the run goes on with this version, and it is damaged: {error}"
                ) from error

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Float tensors that no optimizer trains."""
        return safetensors_file.read_buffers(self.store.version_path(Version(0)))

    @cached_property
    def row_layout(self) -> Layout | None:
        """The model's tensors, when a round's updates lie as rows; None: they do not."""
        layout, aggregation = self.version(Version(0)).manifest.layout, self._config.aggregation
        is_plain = not aggregation.codec_name and not aggregation.partial and aggregation.norm_bound is None
        has_step = self._config.round.mode != "fedasync" and self.method.device is None
        is_small = self._config.round.num_invited * self.num_bytes(Version(0)) <= IN_MEMORY_MAX
        can = can_stack(layout, Step(self.method.optimizer, rule=self.method.rule))
        return layout if is_plain and has_step and is_small and can else None

    def version(self, version: Version) -> VersionFile:
        """As `Versions.version`; of one that is no file yet its `held` is empty."""
        unwritten = self._unwritten.get(version)
        return super().version(version) if unwritten is None else unwritten.described

    def by_digest(self, digest: str) -> VersionFile | None:
        """As `Versions.by_digest`."""
        unwritten = (each.described for each in self._unwritten.values())
        return next((file for file in unwritten if file.digest == digest), None) or super().by_digest(digest)

    def arrays(self, digest: Digest) -> Arrays:
        """The tensors of a version that is kept; nobody may change them."""
        if digest not in self._arrays:
            version = self.by_digest(digest)
            assert version is not None
            unwritten = self._unwritten.get(version.version)
            self._hold(digest, safetensors_file.read(version.path) if unwritten is None else unwritten.arrays)
        return self._arrays[digest]

    def _hold(self, digest: Digest, arrays: Arrays) -> None:
        self._arrays = {**dict(list(self._arrays.items())[1 - CACHED_MAX :]), digest: arrays}

    # ------------------------------------------------------------ folds

    def fold(self, effect: Aggregate, updates: Updates) -> Digest:
        """The next version.

        Raises:
            ValueError: the updates cannot be folded.
            OSError: a file cannot be read or written.
        """
        if self.row_layout is not None:
            return self._fold_rows(effect, updates, self.row_layout)
        base = self.version(effect.base_version)
        plan = plan_of(
            effect,
            base.manifest,
            updates.metas([contribution.digest for contribution in effect.contributions]),
            method=self.method,
            digest_of_version=lambda version: self.version(version).digest,
            buffers=self.buffers,
            settings=self._settings,
        )
        return fold_version(self, plan, updates.weighted(plan), self.method, threads=self._threads)

    def _fold_rows(self, effect: Aggregate, updates: Updates, layout: Layout) -> Digest:
        base, version = self.version(effect.base_version), Version(effect.base_version + 1)
        found = updates.rows([contribution.digest for contribution in effect.contributions])
        weights, factors = weights_and_factors(effect, self.method, [1.0] * len(found))
        nova = self.method.normalized(weights, [row.steps for row in found])
        step = Step(
            self.method.optimizer,
            trained_of(layout, self.buffers),
            scale=nova.scale,
            num_clients=self.method.num_clients,
        )
        slots = dict(self._slots_of(base.version))
        looked_at = [row.magnitudes for row in found if row.magnitudes is not None]
        rows = Rows(
            [row.values for row in found],
            weights,
            factors,
            nova.factors,
            np.stack(looked_at) if len(looked_at) == len(found) else None,
        )
        new = fold_rows(self.arrays(base.digest), layout, rows, step, slots)
        pieces = safetensors_file.pieces_of(layout, new, base.manifest.piece_bytes)
        manifest = VersionManifest.of(pieces, model_dtypes=base.manifest.model_dtypes)
        encoded, path = manifest.encode(), self.store.version_path(version)
        described = VersionFile(version, digest_of(encoded), path, manifest, encoded, 0, range(0), b"")
        self._unwritten[version] = _Unwritten(described, new, slots)
        self._slots = {version: slots}
        self._hold(described.digest, new)
        return described.digest

    def _slots_of(self, version: Version) -> Arrays:
        """What the server optimizer keeps beside a version, by "<slot>/<tensor>"."""
        if version not in self._slots and version:
            self._slots[version] = {
                f"{slot}/{name}": array.reshape(-1)
                for slot in self.method.slots
                for name, array in safetensors_file.read(self.store.version_path(version, slot)).items()
            }
        return self._slots.get(version, {})

    # ------------------------------------------------------------ files

    def write(self, keep: Keep) -> None:
        """Let all versions be files, and stay until this is called again, as who goes on with an interrupted run needs
        them. Raises OSError."""
        for version in list(self._unwritten):
            self._write(version)
        self._saved = _needed(keep)

    def _write(self, version: Version) -> None:
        """As `server.reduce.fold_version` has it."""
        described, arrays, slots = self._unwritten[version]
        manifest = described.manifest
        note = safetensors_file.read_metadata(self.store.version_path(Version(0))) if self.buffers else None
        safetensors_file.write(described.path, arrays, metadata=note, piece_bytes=manifest.piece_bytes, durable=False)
        for slot in self.method.slots:
            of_slot = {
                tensor.name: slots[key].reshape(tensor.shape)
                for tensor in manifest.layout
                if (key := f"{slot}/{tensor.name}") in slots
            }
            path = self.store.version_path(version, slot)
            pieces = safetensors_file.write(path, of_slot, piece_bytes=manifest.piece_bytes, durable=False)
            of_pieces = VersionManifest(layout_of_pieces(pieces), pieces, manifest.piece_bytes)
            self.store.write_manifest(version, of_pieces.encode(), slot)
        self.store.write_manifest(version, described.manifest_bytes)
        self.remember(version_file(self.store, version, described.manifest_bytes))
        del self._unwritten[version]

    # ------------------------------------------------------------ room

    def collect(self, keep: Keep, live: Collection[Digest], *, at_once: bool = False) -> None:
        """Forget the versions that no decision can need any more; now and then, delete their files."""
        for version in [version for version in self._unwritten if version <= keep.version - CACHED_MAX]:
            if version in keep.versions:
                self._write(version)
            else:
                del self._unwritten[version]
        now = time.monotonic()
        if at_once or now - self._collected_at >= GARBAGE_EVERY_S:
            self._collected_at = now
            self.store.collect_garbage(
                live, keep_versions=KEEP_VERSIONS, current=keep.version, pinned=keep.versions | self._saved
            )


def _needed(keep: Keep) -> frozenset[Version]:
    """The one before the current one, too: attacks look at what has changed."""
    return keep.versions | {keep.version, Version(max(0, keep.version - 1))}

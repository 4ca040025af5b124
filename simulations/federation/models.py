"""The versions of a simulated run's model: folded from the updates of a round, read by trainings and evaluations.

Updates that are rows are folded in place (`aggregation.stacked`), all others by the coordinator's reducer, with the
same bits. The newest versions from rows are in memory. They become files only for a snapshot, or when they must be kept
longer: small models have hundreds of versions a second, and few of them are read again.
"""

import time
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from atoll.aggregation.fold.step import Step
from atoll.aggregation.stacked.rows import Rows, can_stack, fold_rows
from atoll.ground.printable import some_of
from atoll.ground.strict_json import ManifestError
from atoll.plugins.place import Place
from atoll.protocol.manifest import VersionManifest, digest_of
from atoll.protocol.manifest_limits import check_model_travels
from atoll.protocol.settings import ConfigError, or_faults
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.config.aggregation import PARTIAL_ACCEPTS
from atoll.server.config.model import run_and_version
from atoll.server.config.privacy import faults_of_layout
from atoll.server.config.run import RunConfig
from atoll.server.files.run_store import RunStore
from atoll.server.files.versions import VersionFile, Versions, version_file
from atoll.server.folding.method import Method
from atoll.server.folding.plan import next_clip_norm, plan_of, shares_of, trained_of, weights_and_factors
from atoll.server.folding.reducer import fold_sums, fold_version
from atoll.server.folding.sums import SumsFolded, plan_of_sums
from atoll.server.required.keep import Keep
from atoll.server.rounds.events import Aggregate
from atoll.simulations.federation.private_noise import private_of_simulation
from atoll.simulations.federation.report import note_of_noise
from atoll.simulations.federation.updates import IN_MEMORY_MAX, Updates
from atoll.simulations.secure.encoded_updates import Meta
from atoll.simulations.secure.sums import SimulatedSums
from atoll.task.arrays import Arrays
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Layout, Piece
from atoll.tensors.pieces import layout_of_pieces
from atoll.training.worker.bench import Bench
from atoll.training.worker.model_files import write_initial
from atoll.training.worker.warm_start import Start, StartRefused

KEEP_VERSIONS = 5
"""Minimum number of the newest versions with files whose files are kept."""

CACHED_MAX = 3
"""Maximum number of newest versions in memory."""

GARBAGE_EVERY_S = 1.0
"""Minimum interval between two deletions of files [s]."""

MISSING_MAX = 5
"""Number of missing tensors that a refusal lists."""


class _Unwritten(NamedTuple):
    """Version without a file."""

    described: VersionFile
    arrays: Arrays
    slots: Arrays


class Models(Versions):
    """Versions of the model of one run: folded from updates, kept in memory or in files.

    Args:
        folder: the folder of the files.
        config: the settings of the run.
        bench: the `Bench` of the task (the task with one site's data), which makes version 0.
        threads: the number of threads for a fold of files.
        keep: the versions that a resumed run needs; None: the run begins, with a new version 0.
        noise_cohort: the clients of the cohort whose noise a private sum has; None: of the run's.

    Raises:
        ConfigError: the model, or an update of it, does not fit into a manifest.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        bench: Bench,
        threads: int,
        keep: Keep | None = None,
        noise_cohort: int | None = None,
    ) -> None:
        super().__init__(RunStore(folder, is_durable=False))
        self._noise_cohort = noise_cohort
        self._folder, self._config, self._threads = folder, config, threads
        faults: list[str] = []
        or_faults(config.aggregation.open_codec, faults)
        method = or_faults(lambda: Method.of(config.aggregation, config.optimizer), faults)
        if method is None or faults:
            raise ConfigError(faults)
        self.method = method
        self._arrays: dict[Digest, Arrays] = {}
        self._slots: dict[Version, Arrays] = {}
        self._unwritten: dict[Version, _Unwritten] = {}  # oldest first
        self._keep_versions = config.model.keep_versions or 1
        self._saved = self._needed(keep) if keep else frozenset[Version]()  # the versions of the last snapshot
        self._collected_at, self.note = 0.0, ""
        self.store.drop_versions_after(keep.version if keep else Version(-1))  # killed after the snapshot
        if keep is None:
            pieces, self.note = self._first(bench)
            manifest = _manifest(pieces, config)
            self.store.write_manifest(Version(0), manifest.encode())
            privacy = config.rules.privacy
            if privacy is not None:
                noise = note_of_noise(config.round.cohort_size, noise_cohort)
                self.note = "\n".join(filter(None, (self.note, noise)))
            if privacy is None or privacy.noise_by == "site":
                return
            if lacking := [*faults_of_layout(manifest.layout, self.buffers, privacy, config.secure_rules)]:
                raise ConfigError(lacking)

    def _first(self, bench: Bench) -> tuple[tuple[Piece, ...], str]:
        """Write version 0; return its pieces, and a note on tensors that were not initialized from the given file."""
        model = self._config.model
        assert run_and_version(model.start) is None, "a command exports the version of a run first"
        start = Start(Path(model.start), model.is_strict) if model.start else None
        try:
            pieces, note = write_initial(self.store.version_path(Version(0)), bench, self._config.seed, start)
        except StartRefused as error:
            raise ConfigError([f"model.start: {fault}" for fault in error.faults]) from error
        return pieces, note and f"version 0 is from {model.start}: {note}"

    def files(self) -> list[str]:
        """Return the files of the versions that a resumed run needs, by their names in the folder of the run."""
        newest, found = max(self._saved), []
        for version in sorted({Version(0), *self._saved}):
            slots = ("", *self.method.slots) if version == newest and version else ("",)
            for slot in slots:
                found += [self.store.version_path(version, slot), self.store.manifest_path(version, slot)]
        return [f"{self._folder.name}/{path.relative_to(self._folder)}" for path in found if path.exists()]

    @cached_property
    def buffers(self) -> frozenset[str]:
        """The float tensors that no optimizer trains."""
        return safetensors_file.read_buffers(self.store.version_path(Version(0)))

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.version(Version(0)).manifest.layout)

    def omission(self, update: Collection[str]) -> str:
        """Return why an update with only these tensors is refused, by the coordinator's rule; empty: it is accepted."""
        if len(update) == len(self._names) or self._config.aggregation.grows:
            return ""
        if self._config.aggregation.partial:
            return "" if update else "the update has no tensor at all"
        missing = sorted(self._names.difference(update))
        return f"the update leaves out {some_of(missing, MISSING_MAX)}: {PARTIAL_ACCEPTS}"

    @cached_property
    def row_layout(self) -> Layout | None:
        """The layout of the model if updates are stored as rows; None: they are not."""
        layout, aggregation = self.version(Version(0)).manifest.layout, self._config.aggregation
        is_plain = not (aggregation.codec_name or aggregation.partial or aggregation.grows or self._config.secure)
        is_plain = is_plain and aggregation.norm_bound is None and self._config.privacy is None
        has_step = self._config.round.mode != "fedasync" and self.method.device is None
        is_small = self._config.round.num_invited * self.num_bytes(Version(0)) <= IN_MEMORY_MAX
        can = can_stack(layout, Step(self.method.optimizer, rule=self.method.rule))
        return layout if is_plain and has_step and is_small and can else None

    def version(self, version: Version) -> VersionFile:
        """Return a version, as `Versions.version` does; a version without a file has no `small_data`."""
        unwritten = self._unwritten.get(version)
        return super().version(version) if unwritten is None else unwritten.described

    def by_digest(self, digest: str) -> VersionFile | None:
        """Return a version by its digest, as `Versions.by_digest` does."""
        unwritten = (each.described for each in self._unwritten.values())
        return next((file for file in unwritten if file.digest == digest), None) or super().by_digest(digest)

    def arrays(self, digest: Digest) -> Arrays:
        """Return the tensors of a stored version, which must not be modified."""
        if digest not in self._arrays:
            version = self.by_digest(digest)
            assert version is not None
            unwritten = self._unwritten.get(version.version)
            self._cache_arrays(digest, safetensors_file.read(version.path) if unwritten is None else unwritten.arrays)
        return self._arrays[digest]

    def _cache_arrays(self, digest: Digest, arrays: Arrays) -> None:
        self._arrays = {**dict(list(self._arrays.items())[1 - CACHED_MAX :]), digest: arrays}

    # ------------------------------------------------------------ folds

    def fold(self, effect: Aggregate, updates: Updates) -> Digest:
        """Fold updates into the next version, and return its digest.

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
            settings=(self._config.aggregation, self._config.optimizer_at(effect.base_version + 1)),
            private=private_of_simulation(self._config, self._noise_cohort),
        )
        return fold_version(self, plan, updates.weighted(plan), self.method, threads=self._threads)

    def next_clip_norm(self, effect: Aggregate, updates: Updates) -> float:
        """Return the clip norm of the private round after a folded one; 0: it is fixed, or the run is not private."""
        private = private_of_simulation(self._config, self._noise_cohort)
        if private is None:
            return 0.0
        base = self.version(effect.base_version)
        metas = updates.metas([contribution.digest for contribution in effect.contributions])
        return next_clip_norm(effect, base.manifest, base.digest, metas, private)

    def fold_sums(self, effect: Aggregate, sums: SimulatedSums) -> SumsFolded:
        """Fold the opened secure sums of a round into the next version.

        Raises:
            NoSum: no session counts; the error has the reason of each.
            ValueError: the updates cannot be folded.
            OSError: a file cannot be read or written.
        """
        rules = self._config.secure_rules
        assert rules is not None
        plan = plan_of_sums(
            effect,
            self.version(effect.base_version),
            {contribution.digest: Meta() for contribution in effect.contributions},
            rules=rules,
            buffers=self.buffers,
            settings=(self._config.aggregation, self._config.optimizer_at(effect.base_version + 1)),
            private=private_of_simulation(self._config, self._noise_cohort),
            streams_of=sums.cryptography.streams_of,
        )
        updates = {place: sums.updates.stored(planned.digest) for place, planned in enumerate(plan.updates)}
        return fold_sums(self, plan, updates, self.method, threads=self._threads)

    def _fold_rows(self, effect: Aggregate, updates: Updates, layout: Layout) -> Digest:
        base, version = self.version(effect.base_version), Version(effect.base_version + 1)
        stored = updates.rows([contribution.digest for contribution in effect.contributions])
        weights, factors = weights_and_factors(effect, self.method, [1.0] * len(stored))
        nova = self.method.normalized(weights, [row.steps for row in stored])
        step = Step(
            self._config.optimizer_at(version).build(),
            trained_of(layout, self.buffers),
            scale=nova.scale,
            num_clients=self.method.num_clients,
            place=Place(effect.round_id, version, base.digest, shares=shares_of(weights, nova.factors, nova.scale)),
        )
        slots = dict(self._slots_of(base.version))
        magnitudes = [row.magnitudes for row in stored if row.magnitudes is not None]
        rows = Rows(
            [row.values for row in stored],
            weights,
            factors,
            nova.factors,
            np.stack(magnitudes) if len(magnitudes) == len(stored) else None,
        )
        new = fold_rows(self.arrays(base.digest), layout, rows, step, slots)
        pieces = safetensors_file.pieces_of(layout, new, base.manifest.piece_bytes)
        manifest = VersionManifest.of(pieces, model_dtypes=base.manifest.model_dtypes)
        encoded, path = manifest.encode(), self.store.version_path(version)
        described = VersionFile(version, digest_of(encoded), path, manifest, encoded, 0, range(0), b"")
        self._unwritten[version] = _Unwritten(described, new, slots)
        self._slots = {version: slots}
        self._cache_arrays(described.digest, new)
        return described.digest

    def _slots_of(self, version: Version) -> Arrays:
        """Return the server optimizer's slots of a version, by "<slot>/<tensor>"."""
        if version not in self._slots and version:
            self._slots[version] = {
                f"{slot}/{name}": array.reshape(-1)
                for slot in self.method.slots
                for name, array in safetensors_file.read(self.store.version_path(version, slot)).items()
            }
        return self._slots.get(version, {})

    # ------------------------------------------------------------ files

    def write(self, keep: Keep) -> None:
        """Write all versions to files for a snapshot; the files stay until the next call.

        Raises:
            OSError: a file cannot be written.
        """
        for version in list(self._unwritten):
            self._write(version)
        self._saved = self._needed(keep)

    def _write(self, version: Version) -> None:
        """Write a version to the same files as `fold_version`."""
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

    def _needed(self, keep: Keep) -> frozenset[Version]:
        """Return the versions that the user keeps, and the ones that a resumed run needs.

        The second newest is among them, for the step of free riders.
        """
        first = max(0, keep.version - max(self._keep_versions, 2) + 1)
        return keep.versions | {Version(number) for number in range(first, keep.version + 1)}

    # ------------------------------------------------------------ garbage

    def collect(self, keep: Keep, live: Collection[Digest], *, at_once: bool = False) -> None:
        """Drop the versions that no decision can need any more; at most every `GARBAGE_EVERY_S`, delete their files."""
        for version in [version for version in self._unwritten if version <= keep.version - CACHED_MAX]:
            if version in keep.versions or version > keep.version - self._keep_versions:
                self._write(version)
            else:
                del self._unwritten[version]
        now = time.monotonic()
        if at_once or now - self._collected_at >= GARBAGE_EVERY_S:
            self._collected_at = now
            self.store.collect_garbage(
                live,
                keep_versions=max(KEEP_VERSIONS, self._keep_versions),
                current=keep.version,
                pinned=keep.versions | self._saved,
            )


def _manifest(pieces: Iterable[Piece], config: RunConfig) -> VersionManifest:
    """Return the manifest of version 0, which would be valid for a deployed run of the task.

    Raises:
        ConfigError: the model, or an update of it, does not fit into a manifest.
    """
    manifest = VersionManifest.of(pieces)
    try:
        check_model_travels(manifest, config.aggregation.codec_name)
    except ManifestError as error:
        raise ConfigError([str(error)]) from error
    return manifest

"""The reducer of a run whose updates are at aggregation ranks: it plans here, the ranks fold, and each keeps a shard.

The coordinator keeps the manifests, version 0 as the task made it, and complete versions gathered for the server's
evaluation.
"""

import asyncio
from collections import Counter
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.aggregation.fold.prepared import check_whole
from atoll.aggregation.fold.step import Step
from atoll.aggregation.masked.fold import Outcome
from atoll.ground.process import crash_points
from atoll.ground.strict_json import ManifestError
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.threads import begin_on_thread
from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.server.folding.evaluator import Evaluator
from atoll.server.folding.plan import trained_of
from atoll.server.folding.reducer import Reducer, exists_from_now_on
from atoll.server.folding.sums import SumsFolded
from atoll.server.journal.codec import decode
from atoll.server.ranks.fetch import NotFetched, gather
from atoll.server.ranks.registry import AGAIN_S, Ranks
from atoll.server.rounds.events import Aggregate
from atoll.tensors.pieces import cut_layout
from atoll.tensors.safetensors_file import read_buffers, read_metadata
from atoll.training.worker.warm_start import Start


class ShardedReducer(Reducer):
    """Reducer whose updates and folds are at ranks; see `Reducer` for the other arguments.

    Args:
        ranks: the coordinator's ranks.
        run_id: the run.
        patience: the time that a rank may be away while a round is folded [s].
        dialer: opens the channels to the ranks.
    """

    def __init__(
        self, ranks: Ranks, run_id: RunId, patience: float, dialer: Dialer, *reducer: Any, **options: Any
    ) -> None:
        super().__init__(*reducer, **options)
        self._dialer = dialer
        self._ranks, self._run_id, self._patience = ranks, run_id, patience

    async def has_room(self, num_bytes: int) -> bool:
        """Return whether there is room, like `Reducer.has_room`, here and at every connected rank."""
        return not self._ranks.are_full(self._run_id) and await super().has_room(num_bytes)

    async def write_initial(self, evaluator: Evaluator, seed: int, start: Start | None = None) -> None:
        """Write version 0, like `Reducer.write_initial`.

        Raises:
            ManifestError: also if the ranks would split a tensor that the server optimizer needs as a whole.
        """
        await super().write_initial(evaluator, seed, start)
        manifest = self.version(Version(0)).manifest
        buffers = read_buffers(self.store.version_path(Version(0)))
        step = Step(self.method.optimizer, trained_of(manifest.layout, buffers))
        try:
            check_whole(step, manifest.layout, Counter(piece.tensor for piece in manifest.pieces))
        except ValueError as fault:
            raise ManifestError(str(fault)) from fault

    async def fold(self, effect: Aggregate) -> Digest:
        """Fold a round, like `Reducer.fold`, by all ranks together.

        Raises:
            FoldRefused: the updates cannot be folded.
            UpdateDamaged: an update is missing or damaged at a rank.
            RanksAway: a rank is away for longer than the patience.
            OSError: the journal cannot be read, or the manifest cannot be written.
        """
        return (await self._folded(effect))[0]

    async def fold_sums(self, effect: Aggregate) -> SumsFolded:
        """Fold the secure sums of a round, like `Reducer.fold_sums`, by all ranks together; they get the streams' keys.

        Raises:
            FoldRefused: the updates cannot be folded.
            NoSum: no session counts; the error has the reason of each.
            UpdateDamaged, RanksAway, OSError: as `fold`.
        """
        digest, folded = await self._folded(effect)
        return SumsFolded.of(digest, decode(Outcome, folded[0].outcome.decode(), where="the outcome of a fold"))

    async def _folded(self, effect: Aggregate) -> tuple[Digest, list[pb.Folded]]:
        crash_points.reached("aggregate.before_fold")
        plan = await begin_on_thread(self._folding, self._encoded_plan, effect)
        folded = await self._ranks.fold(self._run_id, effect.round_id, plan, patience=self._patience)
        crash_points.reached("aggregate.after_fold")
        return await begin_on_thread(self._folding, self._take_over, effect, folded), folded

    def _encoded_plan(self, effect: Aggregate) -> bytes:
        plan, _ = self._plan(effect, self._accepted([c.digest for c in effect.contributions]))
        return plan.encode()

    def _take_over(self, effect: Aggregate, folded: list[pb.Folded]) -> Digest:
        base = self.version(effect.base_version)
        cuts = cut_layout(base.manifest.layout, base.manifest.piece_bytes)
        digests = (digest.hex() for of_rank in folded for digest in of_rank.sha256)
        pieces = [replace(piece, sha256=sha256) for piece, sha256 in zip(cuts, digests, strict=True)]
        return exists_from_now_on(self.store, Version(effect.base_version + 1), pieces, base)

    async def whole(self, version: Version) -> Path:
        """Return the file of a complete version, gathered from the ranks if it is not here.

        Raises:
            RanksAway, NotFetched: the version could not be gathered within the patience.
            OSError: the file cannot be written.
        """
        file, until = self.version(version), asyncio.get_running_loop().time() + self._patience
        while not file.path.exists():
            await self._ranks.all_here(self._patience)  # shortly after a start they are absent
            note = read_metadata(self.store.version_path(Version(0)))
            addresses = list(self._ranks.addresses().addresses)
            try:
                what = (self._run_id, file.digest, file.manifest, file.path, note)
                await gather(addresses, *what, dialer=self._dialer)
            except NotFetched:
                if asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(AGAIN_S)
        return file.path

    async def collect_garbage(
        self, live: Container[Digest], *, pinned_versions: set[Version], current: Version, oldest_base: Version | None
    ) -> None:
        """Collect garbage, like `Reducer.collect_garbage`, and at every rank."""
        collect = pb.Collect(
            run_id=self._run_id,
            current=current,
            keep_versions=self.keep_versions,
            pinned=sorted(pinned_versions),
            is_over=oldest_base is None,
            oldest_base=oldest_base or 0,
        )
        self._ranks.collect(collect)
        await super().collect_garbage(live, pinned_versions=pinned_versions, current=current, oldest_base=oldest_base)

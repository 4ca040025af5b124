"""Secure rounds in memory: sessions of real members, the files that they mask, and a coordinator's or ranks' stores."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from atoll.client.secure.member import Mask
from atoll.protocol.manifest import UpdateManifest, VersionManifest
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.folding.reducer import Reducer
from atoll.server.journal.codec import StoredUpdateMeta, encode_meta
from atoll.server.rounds.events import Aggregate, Contribution
from atoll.server.rounds.secure_rules import SecureRules
from atoll.server.rounds.session_events import SessionSum
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, pieces_in_order
from atoll.tensors.masked.encode import encode_update
from atoll.tensors.masked.mask import mask_update
from atoll.tensors.pieces import piece_bytes_of
from atoll.tensors.secure.masked_layout import masked_layout
from atoll.tensors.secure.plan import EncodingPlan
from tests.server.sessions.small_federation import SmallFederation, sites_of, terms_of
from tests.tensors.masked.members import LAYOUT, stored, update_of

RULES = SecureRules(clip_norm=1.0, examples_max=100, metrics=(("accuracy", 2), ("loss", 2)))
FLOATS = sorted(tensor.name for tensor in LAYOUT if tensor.dtype == "F32")
MASKED = masked_layout(LAYOUT, RULES.bits, RULES.metrics)
RUN = RunId("run-1")


class Members(SmallFederation):
    """A session of which the pads and the reveals are kept."""

    def _effects(self, site: Any, effects: Any) -> Any:
        for effect in effects:
            if isinstance(effect, Mask):
                self.pads = {
                    **getattr(self, "pads", {}),
                    site.name: [(stream.key, stream.sign) for stream in effect.streams],
                }
        return super()._effects(site, effects)

    def _open(self, reveals: Any) -> None:
        self.reveals = reveals
        super()._open(reveals)


@dataclass
class SecureRun:
    """The masked updates of a round."""

    effect: Aggregate = field(default_factory=lambda: Aggregate(RoundId(1), Version(0), ()))
    data: dict[Digest, bytes] = field(default_factory=dict)
    manifests: dict[Digest, UpdateManifest] = field(default_factory=dict)
    parts: dict[Digest, list[tuple[PartManifest, bytes]]] = field(default_factory=dict)
    updates: dict[str, dict[str, Any]] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, pieces: tuple[Piece, ...], raw: bytes, num_parts: int = 1) -> Digest:
        """Add the bytes of an update, whole or dealt over parts, and return its digest."""
        parts = []
        for index in range(num_parts if num_parts > 1 else 0):
            mine, data, begin = [], b"", 0
            for place, piece in enumerate(pieces):
                if place % num_parts == index:
                    mine.append(piece)
                    data += raw[begin : begin + piece.num_bytes]
                begin += piece.num_bytes
            parts.append((PartManifest(index, tuple(mine)), data))
        manifest = UpdateManifest(
            run_id=RUN,
            round_id=RoundId(1),
            client_id=ClientId(name),
            base_version=Version(0),
            base_digest=Digest("0" * 64),
            num_examples=1,
            work=1.0,
            pieces=() if parts else pieces,
            parts=tuple(part.listed for part, _ in parts),
        )
        digest = manifest.digest
        self.manifests[digest], self.data[digest], self.parts[digest] = manifest, raw, parts
        return digest

    def meta(self, digest: Digest, held: tuple[int, ...] = (0,)) -> StoredUpdateMeta:
        """Return the findings about an update, of which part i lies at rank held[i]."""
        ranks = held if self.parts[digest] else ()
        return StoredUpdateMeta(self.manifests[digest].encode(), {}, {}, held[0], ranks)

    def row(self, digest: Digest) -> SimpleNamespace:
        """Return the row of an update in the journal of a coordinator that has its bytes."""
        return SimpleNamespace(meta=encode_meta(self.meta(digest)), data=self.data[digest])

    def with_update(self, old: Digest, new: Digest) -> Aggregate:
        """Return the effect with another update of a client."""
        changed = (replace(c, digest=new) if c.digest == old else c for c in self.effect.contributions)
        return replace(self.effect, contributions=tuple(changed))

    def in_one_file_each(self) -> "SecureRun":
        """Return the round with updates that are not in parts."""
        whole = SecureRun(updates=self.updates, examples=self.examples)
        contributions = []
        for each in self.effect.contributions:
            manifest = self.manifests[each.digest]
            pieces = manifest.pieces or pieces_in_order(p for part, _ in self.parts[each.digest] for p in part.pieces)
            contributions.append(replace(each, digest=whole.add(each.client_id, pieces, self.data[each.digest])))
        whole.effect = replace(self.effect, contributions=tuple(contributions))
        return whole


def secure_round(folder: Path, *, num_parts: int = 1) -> SecureRun:
    """Run two sessions of four and of three members; one of the first ends after it has sent its shares."""
    sums, contributions, run = [], [], SecureRun()
    for number, size in enumerate((4, 3)):
        sites = [replace(site, name=f"s{number}-{site.name}", pinned={}) for site in sites_of(size)]
        keys = {site.name: site.identity.key for site in sites}
        for site in sites:
            site.pinned.update(keys)
        words = {site.name: np.zeros(4, np.uint32) for site in sites}
        session = Members(sites, words, terms_of(session=number), random.Random(number), {"s0-site-01": 2})
        session.run()
        of = session.session
        assert of is not None
        for position in sorted(of.survivors):
            name = sites[position].name
            run.updates[name] = update_of(LAYOUT, 100 * number + position)
            run.examples[name] = 20 + 10 * position
            plan = EncodingPlan(
                bits=RULES.bits,
                clip_norm=RULES.clip_norm,
                exponents=(0,) * len(FLOATS),
                examples_max=RULES.examples_max,
                metrics=RULES.metrics,
                num_examples=run.examples[name],
                statistics={"loss": (2.0, 20.0)},
            )
            encode_update(stored(folder / "plain", run.updates[name]), folder / "words", layout=LAYOUT, plan=plan)
            pieces = mask_update(folder / "words", folder / "masked", MASKED, session.pads[name])
            raw = (folder / "masked").read_bytes()
            digest = run.add(name, tuple(pieces), raw[-sum(piece.num_bytes for piece in pieces) :], num_parts)
            contributions.append(Contribution(ClientId(name), digest, 1, 1.0))
        sums.append(SessionSum(number, 1, of.id, of.roster, of.masking, of.survivors, dict(session.reveals)))
    contributions.sort(key=lambda each: each.client_id)
    run.effect = Aggregate(RoundId(1), Version(0), tuple(contributions), sums=tuple(sums))
    return run


def reducer_of(folder: Path, run: SecureRun, base: dict[str, Any]) -> Reducer:
    """Return the reducer of a run whose version 0 is there."""
    settings: Any = SimpleNamespace(
        aggregation=AggregationConfig(),
        optimizer=OptimizerConfig(),
        optimizer_at=lambda version: OptimizerConfig(),
        secure=True,
        secure_rules=RULES,
        rules=SimpleNamespace(privacy=None),
    )
    reducer = Reducer(
        folder,
        ThreadPoolExecutor(1),
        lambda digests: {digest: run.row(digest) for digest in digests},  # type: ignore[return-value,misc]
        settings=settings,
        is_over=False,
        keep_versions=3,
    )
    path = reducer.store.version_path(Version(0))
    pieces = safetensors_file.write(path, base, piece_bytes=piece_bytes_of(LAYOUT), durable=False)
    reducer.store.write_manifest(Version(0), VersionManifest.of(pieces).encode())
    return reducer

"""The secure sums of a round for the fold: what masked updates look like, the plan with its streams, the outcome."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from atoll.aggregation.masked.fold import Outcome, Session
from atoll.protocol.vocabulary import Digest
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.files.versions import VersionFile
from atoll.server.folding.plan import FoldPlan, Known, Planned, PlannedSession, PlannedSums, Private
from atoll.server.opening.streams import Taken, open_sum
from atoll.server.rounds.events import Aggregate, Sums
from atoll.server.rounds.secure_rules import SecureRules
from atoll.server.rounds.session_events import SessionSum
from atoll.tensors.layout import Layout, Piece
from atoll.tensors.secure.masked_layout import exponents_of, masked_layout
from atoll.tensors.updates.reader import StoredUpdate


def expected_layout(layout: Layout, rules: SecureRules | None) -> Layout:
    """Return the tensors that an update of a run must have: those of the base version, or the words of secure sums.

    Args:
        layout: of the base version.
        rules: of the secure sums; None: updates are plain.
    """
    return layout if rules is None else masked_layout(layout, rules.bits, rules.metrics)


def faults_of_words(expected: Layout, pieces: Iterable[Piece]) -> list[str]:
    """List the pieces of a masked update whose words have other bits than the sum's; wider ones would not add."""
    dtypes = {tensor.name: tensor.dtype for tensor in expected}
    wrong = {
        piece.tensor: f"tensor {piece.tensor!r} has dtype {piece.dtype!r}, allowed in this sum: {dtypes[piece.tensor]}"
        for piece in pieces
        if piece.dtype != dtypes.get(piece.tensor, piece.dtype)
    }
    return [*wrong.values()]


@dataclass(frozen=True, slots=True)
class SumsFolded:
    """The result of a fold of secure sums."""

    digest: Digest
    """The digest of the next version."""
    dropped: Mapping[int, str]
    """The sessions that count in no version, each with the reason."""
    ranges: tuple[int, ...]
    """Exponents of the float tensors' ranges in the next round."""
    statistics: Sums
    """Sums of the training's metrics, over all members whose sums count."""
    weight: float
    """Sum of these members' weights a, each at most 1."""
    members: int

    @classmethod
    def of(cls, digest: Digest, outcome: Outcome) -> "SumsFolded":
        """Return the result of a fold with this outcome."""
        return cls(digest, outcome.dropped, outcome.exponents, outcome.statistics, outcome.weight, outcome.members)


def plan_of_sums(
    effect: Aggregate,
    base: VersionFile,
    metas: Mapping[Digest, Known],
    *,
    rules: SecureRules,
    buffers: frozenset[str],
    settings: tuple[AggregationConfig, OptimizerConfig],
    private: Private | None = None,
    streams_of: Callable[[SessionSum], Iterable[Taken]] | None = None,
) -> FoldPlan:
    """Plan the fold of a round's secure sums: open each, and name the updates in it.

    Args:
        effect: the masked updates, and what opens their sums.
        base: the version that the mean is added to.
        metas: the metadata of each update.
        rules: of the sums.
        buffers: the float tensors that no optimizer trains.
        settings: the settings of the run.
        private: of a run with differential privacy; None: the sums are not private.
        streams_of: returns the streams to take off a sum; None: those that its reveals open.

    Raises:
        NotOpened: the reveals of a sum open nothing.
        ValueError: a member of a sum has no update.
    """
    places = {contribution.client_id: place for place, contribution in enumerate(effect.contributions)}
    sessions = []
    for each in effect.sums:
        if absent := [name for name in each.members if name not in places]:
            raise ValueError(f"session {each.session}: {', '.join(absent[:5])} of its sum has no update")
        streams = tuple((stream.key.hex(), stream.sign) for stream in (streams_of or _streams_of)(each))
        sessions.append(PlannedSession(each.session, tuple(places[name] for name in each.members), streams))
    updates = []
    for contribution in effect.contributions:
        meta = metas[contribution.digest]
        updates.append(Planned(contribution.digest, meta.rank, 1, 1.0, 1.0, tuple(sorted(set(meta.ranks)))))
    return FoldPlan(
        base_version=effect.base_version,
        base_digest=base.digest,
        updates=tuple(updates),
        totals={},
        omitted={},
        scale=1.0,
        anchor=None,
        buffers=tuple(sorted(buffers)),
        aggregation=settings[0],
        optimizer=settings[1],
        round_id=effect.round_id,
        sums=PlannedSums(
            rules.bits,
            rules.clip_norm,
            exponents_of(effect.ranges, base.manifest.layout),
            rules.examples_max,
            rules.metrics,
            tuple(sessions),
            rules.is_private,
            rules.share,
            None if private is None else private.planned_of_sums(effect, base.digest, rules.bits),
        ),
    )


def _streams_of(summed: SessionSum) -> Iterable[Taken]:
    return open_sum(summed.roster, summed.id, summed.masking, summed.survivors, summed.reveals).streams


def sessions_of(plan: FoldPlan, updates: Mapping[int, StoredUpdate]) -> list[Session]:
    """Return the sessions of a plan.

    Args:
        plan: with sums.
        updates: those that are here, or have parts here, by their places in the plan.
    """
    assert plan.sums is not None
    return [
        Session(
            session.number,
            len(session.updates),
            tuple(updates[place] for place in session.updates if place in updates),
            tuple((bytes.fromhex(key), sign) for key, sign in session.streams),
        )
        for session in plan.sums.sessions
    ]

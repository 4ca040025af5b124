"""What every kind of round has: a record, a clock, an aggregation, and exactly one end. Pure.

    COLLECTING ---closed------------> AGGREGATING ---Aggregated----------> COMMITTED
    COLLECTING ---abandoned, stopped---------------------------------> ABANDONED
                                      AGGREGATING ---AggregationFailed---> ABANDONED

`rounds` is the round with a cohort, `buffer` that of an asynchronous run.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from atoll.protocol.vocabulary import AbandonReason, ClientId, Digest, Fate, Phase, RoundId, Version
from atoll.server.rounds.events import Abandon, Aggregate, Commit, Effect, Update
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.record import CarriedRecord, Outage, RoundRecord
from atoll.server.rounds.update_claims import work_scale

Effects = tuple[Effect, ...]


class OpenRound(ABC):
    """A round that has not ended. A new round is a new machine."""

    def __init__(self, round_id: RoundId, base_version: Version, policy: StragglerPolicy, now: float) -> None:
        self.policy = policy
        self.record = RoundRecord(
            round_id=round_id,
            base_version=base_version,
            opened_at=now,
            cohort_size=policy.num_wanted,
            quorum=policy.quorum_count,
            num_needed_to_draw=policy.num_needed_to_draw,
            late=policy.late,
            mode=policy.mode,
        )
        self._is_drawing = False
        self._extended = 0.0

    # ------------------------------------------------------------ time

    @property
    def phase(self) -> Phase:
        """Where the round stands."""
        return self.record.phase

    @property
    @abstractmethod
    def deadline(self) -> float | None:
        """When `time_passed` must be called; None when nothing is timed."""

    @abstractmethod
    def time_passed(self, now: float) -> Effects:
        """The deadline is here."""

    def coordinator_started(self, down_since: float, now: float) -> Effects:
        """Extend by the downtime, up to `outage_max` in all, and repeat what was under way."""
        record = self.record
        seconds = max(0.0, now - down_since)
        extension = min(seconds, self.policy.outage_max - self._extended)
        self._extended += extension
        record.outages.append(Outage(now, seconds, extension))
        self._extend(extension, now)
        self._is_drawing = False  # nobody is connected: draw again from the same population when it is back
        if record.phase is Phase.AGGREGATING:
            return (self._aggregate(),)
        return ()

    @abstractmethod
    def _extend(self, seconds: float, now: float) -> None:
        """Every deadline of this round moves; nobody is connected."""

    # ------------------------------------------------------------ what happens

    @property
    @abstractmethod
    def held(self) -> Iterator[Update]:
        """The accepted updates that wait for this round's end."""

    @abstractmethod
    def look_for_clients(self, now: float) -> Effects:
        """Someone joined, or the round opened."""

    @abstractmethod
    def cohort_drawn(self, clients: tuple[ClientId, ...], now: float) -> Effects:
        """The sampler has answered: invite. An answer that nobody waits for any more is ignored."""

    def sampler_failed(self, detail: str, now: float) -> Effects:
        """The user's own sampler raised."""
        return self._abandon(AbandonReason.SAMPLER_FAILED, now, detail) if self._is_drawing else ()

    def client_joined(self, client_id: ClientId, now: float) -> Effects:
        """A client that was invited is (back) on the line."""
        return ()

    def client_disconnected(self, client_id: ClientId, now: float) -> None:  # noqa: B027 - most do not care
        """Its control stream ended."""

    def client_gave_up(self, client_id: ClientId, fate: Fate, reason: str, detail: str, now: float) -> Effects:
        """FAILED, REFUSED or LOST: nothing more is expected of this client."""
        return ()

    def upload_begun(self, client_id: ClientId, now: float) -> None:  # noqa: B027
        """The first bytes of an update are on their way."""

    # ------------------------------------------------------------ the end

    @abstractmethod
    def _aggregate(self) -> Aggregate:
        """A function of the record alone, so that it can be repeated after a crash."""

    def _as_stale(self, update: Update) -> CarriedRecord:
        """How much an update counts that may be of an earlier version."""
        staleness = self.record.base_version - update.base_version
        scale = self.policy.discount(staleness) * work_scale(update.work, self.policy)
        return CarriedRecord(update.client_id, update.round_id, staleness, update.digest, update.num_examples, scale)

    def aggregated(self, model_digest: Digest, now: float) -> Effects:
        """The next version lies on disk: the round is committed."""
        assert self.phase is Phase.AGGREGATING, self.phase
        record = self.record
        record.phase, record.ended_at = Phase.COMMITTED, now
        record.version, record.model_digest = Version(record.base_version + 1), model_digest
        used = tuple(c.digest for c in self._aggregate().contributions)
        return (Commit(record.round_id, record.version, model_digest, used),)

    def aggregation_failed(self, detail: str, now: float) -> Effects:
        """The fold raised."""
        assert self.phase is Phase.AGGREGATING, self.phase
        return self._abandon(AbandonReason.AGGREGATION_FAILED, now, detail)

    def stop(self, reason: str, now: float) -> Effects:
        """The operator ends the run; a round that aggregates is let finish by whoever calls."""
        assert self.phase in (Phase.SELECTING, Phase.COLLECTING), self.phase
        return self._abandon(AbandonReason.STOP_REQUESTED, now, reason)

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """Whether anybody was invited to it, or anything is in."""

    def pause(self, reason: str, now: float) -> Effects:
        """The operator wants no new round, and this one has not begun."""
        assert not self.has_begun
        return self._abandon(AbandonReason.PAUSE_REQUESTED, now, reason)

    def _abandon(self, reason: AbandonReason, now: float, detail: str) -> Effects:
        record = self.record
        releases = self._released_by(reason, now)
        record.phase, record.ended_at, record.abandon_reason, record.detail = Phase.ABANDONED, now, reason, detail
        return (*releases, Abandon(record.round_id, reason))

    def _released_by(self, reason: AbandonReason, now: float) -> Effects:
        """Who is told to stop when the round is abandoned."""
        return ()

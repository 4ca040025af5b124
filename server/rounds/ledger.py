"""The state of a run between two rounds, which is the content of a snapshot. Pure.

The ledger also keeps architecture, invariant 1: every accepted update is used in exactly one committed model, or the
record of its round says why not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from atoll.protocol.vocabulary import TERMINAL, AbandonReason, ClientId, Digest, Phase, RoundId, RunState, Version
from atoll.server.invariants import Violation
from atoll.server.members.membership import Membership
from atoll.server.rounds.client_evaluation import ClientEvaluation
from atoll.server.rounds.cohort_round import Round
from atoll.server.rounds.events import AmendRecord, ComputeMetrics, Effect, NoiseRow, Update
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_rules import MeasuredVersion, Progress, RunRules


@dataclass(slots=True)
class Ledger:
    """State of a run while no round is open."""

    state: RunState = RunState.QUEUED
    cause: str = ""
    now: float = 0.0
    version: Version = Version(0)  # noqa: RUF009 - a NewType of an int
    model_digest: Digest = Digest("")  # noqa: RUF009
    next_round: RoundId = RoundId(1)  # noqa: RUF009
    failures: int = 0  # consecutive abandoned rounds
    stop_reason: str | None = None  # the operator's reason to stop, while a round still aggregates
    pause_reason: str | None = None  # the operator's reason to pause, while a round is still open
    resumes_itself: bool = False  # paused, or about to be, after a wait in vain: it resumes when the quorum returns
    is_round_due: bool = False  # OpenNextRound was issued and not yet answered
    retry_at: float = 0.0  # the time before which a round is not repeated; 0: none
    membership: Membership = field(default_factory=Membership)
    carried: dict[ClientId, Update] = field(default_factory=dict)  # accepted late, waiting for a commit
    training: dict[ClientId, RoundId] = field(default_factory=dict)  # asynchronous: the round of each open invitation
    num_too_old: int = 0  # asynchronous: invitations that ended because the work was too old to count
    waiting: list[Update] = field(default_factory=list)  # asynchronous: accepted while no buffer was open, in order
    past: dict[RoundId, RoundRecord] = field(default_factory=dict)  # the last few rounds
    evaluation: ClientEvaluation | None = None
    rules: RunRules | None = None  # the rules changed by a resume; None: the run's first ones
    unevaluated: list[Version] = field(default_factory=list)  # EvaluateModel was issued and not yet answered
    computing: list[ComputeMetrics] = field(default_factory=list)  # issued and not yet answered
    best: MeasuredVersion | None = None  # value for `RunRules.best`
    progress: Progress | None = None  # progress for `RunRules.stop`
    short_since: float | None = None  # start time of a full disk; None: there is room
    short_of: str = ""  # the message about what does not fit
    short_look: float = 0.0  # time of the next log line about it
    early_stop: str = ""  # the cause of an early stop, until a resume
    lost: list[Version] = field(default_factory=list)  # versions whose files are lost, until a resume
    restoration: str = ""  # the newest restored backup whose later rounds the operator has named
    ranges: list[int] = field(default_factory=list)  # exponents of the tensors' ranges in the next secure sum
    clip_norm: float = 0.0  # of the next private round, if it follows the updates; 0: the one of the settings
    noises: tuple[NoiseRow, ...] = ()  # of correlated noise: the last versions', which later ones draw again

    @property
    def is_open(self) -> bool:
        """Return whether the run has begun and not ended: it handles clients' events, and their updates may count."""
        return self.state not in TERMINAL and self.model_digest != ""

    @property
    def newest_published(self) -> RoundId:
        """The newest round with a version, as far as the kept records tell; at least the number of versions."""
        published = (round_id for round_id, record in self.past.items() if record.version is not None)
        return RoundId(max(published, default=self.version))

    def forget_old_rounds(self, *, most: int, oldest_base: Version | None = None) -> None:
        """Delete the records of old rounds.

        It keeps the last `most` rounds, rounds whose updates still wait for a commit, and rounds that began from
        `oldest_base` or a later version.

        Call it when a round opens, not when one ends: the end of a round writes into older records.
        """
        still_open = {update.round_id for update in self.carried.values()}
        for old in sorted(self.past)[:-most]:
            is_young = oldest_base is not None and self.past[old].base_version >= oldest_base
            if old not in still_open and not is_young:
                del self.past[old]

    def carry(self, update: Update, *, into: dict[ClientId, Update] | None = None) -> list[Effect]:
        """Keep an accepted update for the next commit, or add it to the late updates of the open round (`into`).

        Of two updates by one client, the later round's is kept.
        """
        table = self.carried if into is None else into
        other = table.get(update.client_id)
        older, newer = (update, other) if other is not None and other.round_id > update.round_id else (other, update)
        table[update.client_id] = newer
        if older is None:
            return []
        return self.leave_unused(older, f"superseded by the update of round {newer.round_id}")

    def leave_unused(self, update: Update, why: str) -> list[Effect]:
        """Record, in the update's round, why no model will contain this accepted update."""
        record = self.past.get(update.round_id)
        if record is None:
            return []
        record.clients[update.client_id].unused_because = why
        return [AmendRecord(update.round_id)]

    def settle_buffer_committed(self, record: RoundRecord) -> list[Effect]:
        """Record that a commit has used the updates of its buffer, in the records of their rounds."""
        self.past[record.round_id] = record
        for row in record.buffer:
            self.past[row.round_id].clients[row.client_id].used_in = record.round_id
        return [
            AmendRecord(round_id) for round_id in sorted({row.round_id for row in record.buffer} - {record.round_id})
        ]

    def settle_buffer_abandoned(self, record: RoundRecord, updates: list[Update]) -> list[Effect]:
        """Keep the updates of an abandoned buffer for the next one, or record why no model will contain them."""
        self.past[record.round_id] = record
        why = f"the aggregation of round {record.round_id} failed"  # with the same updates it would fail again
        if record.abandon_reason is AbandonReason.STOP_REQUESTED:
            why = "the run was stopped below the quorum"
        elif record.abandon_reason is not AbandonReason.AGGREGATION_FAILED:
            self.waiting = [*updates, *self.waiting]  # updates that arrived during its fold are later
            return []
        return [effect for update in updates for effect in self.leave_unused(update, why)]

    def settle_committed(self, record: RoundRecord, late: Mapping[ClientId, Update]) -> list[Effect]:
        """Record that a commit has used the late updates of its round, or that they were superseded."""
        effects: list[Effect] = []
        for client_id, update in sorted(late.items()):
            if update.digest in record.superseded:
                effects += self.leave_unused(update, f"superseded by the update of round {record.round_id}")
            elif (origin := self.past.get(update.round_id)) is not None:
                origin.clients[client_id].used_in = record.round_id
                effects.append(AmendRecord(update.round_id))
        return effects

    def settle_abandoned(self, round_: Round, *, carry: bool) -> list[Effect]:
        """Carry over the accepted updates of an abandoned round, or record why no model will contain them."""
        record = round_.record
        assert record.phase is Phase.ABANDONED
        why = f"the aggregation of round {record.round_id} failed"  # with the same updates it would fail again
        is_failed = record.abandon_reason is AbandonReason.AGGREGATION_FAILED
        effects: list[Effect] = []
        for _, update in sorted(round_.late.items()):
            effects += self.leave_unused(update, why) if is_failed else self.carry(update)
        for client_id, update in sorted(round_.reported_on_time.items()):
            if carry and not is_failed:
                effects += self.carry(update)
            else:
                record.clients[client_id].unused_because = f"the round was abandoned: {record.abandon_reason}"
        return effects

    def settle_end(self, state: RunState, *, is_private: bool) -> list[Effect]:
        """Record, at the end of the run, that the updates still waiting for a commit will not be used.

        Those of a private run were charged when they were accepted.
        """
        effects, charged = list[Effect](), ", and its charge stays" if is_private else ""
        for update in (*(update for _, update in sorted(self.carried.items())), *self.waiting):
            effects += self.leave_unused(update, f"the run ended first ({state}){charged}")
        self.carried.clear()
        self.waiting.clear()
        return effects

    def validate(self) -> None:
        """Check that each past round has ended, and that each commit has made one version; raises Violation."""
        if self.state in TERMINAL and (self.carried or self.waiting or self.training or self.is_round_due):
            waits = ([*self.carried], [u.digest for u in self.waiting], self.training, self.is_round_due)
            raise Violation(1, f"something waits although the run is {self.state}: {waits}")
        records = [self.past[round_id] for round_id in sorted(self.past)]
        for record in records:
            if record.ended_at is None or record.round_id >= self.next_round:
                of = f"round {record.round_id}"
                raise Violation(4, f"{record.phase} among those that have ended before round {self.next_round}", of)
        for before, after in pairwise(records):
            if after.round_id == before.round_id + 1 and after.base_version != before.version_after:
                of = f"round {after.round_id}"
                raise Violation(5, f"it begins from version {after.base_version}, not {before.version_after}", of)
        if records and records[-1].version_after != self.version:
            raise Violation(5, f"the run has version {self.version}, not {records[-1].version_after}")

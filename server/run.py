"""A run as a pure state machine: one round after another, late updates, evaluations, one end with one cause.

It owns the round that is open and the ledger of everything else, and routes every event. It is what the journal
replays: the same events at the same times give the same effects.

    QUEUED --RunStarted--> RUNNING --rounds committed, evaluations in--> FINISHED
                                   --abandoned once more than `retry`--> FAILED
                                   --StopRequested---------------------> STOPPED
    FAILED, STOPPED --ResumeRequested--> RUNNING
"""

from dataclasses import dataclass

from atoll.protocol.vocabulary import (
    AbandonReason,
    ClientId,
    Fate,
    Phase,
    RejectReason,
    ReleaseReason,
    RoundId,
    RunState,
)
from atoll.server.evaluation import ClientEvaluation, clients_to_ask
from atoll.server.events import (
    Abandon,
    Accept,
    Aggregated,
    AggregationFailed,
    AmendRecord,
    ClientDisconnected,
    ClientEvaluated,
    ClientFailed,
    ClientJoined,
    ClientLost,
    CohortDrawn,
    Commit,
    CoordinatorStarted,
    Effect,
    EndRun,
    EvaluateModel,
    Event,
    ModelEvaluated,
    OpenNextRound,
    Reject,
    Release,
    ResumeRequested,
    RoundDue,
    RunStarted,
    SamplerFailed,
    StopRequested,
    TimePassed,
    Update,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)
from atoll.server.ledger import Ledger
from atoll.server.policy import StragglerPolicy
from atoll.server.record import ClientRecord, RoundRecord
from atoll.server.rounds import Effects, Round, fault_of, note_accepted


@dataclass(frozen=True, slots=True)
class RunRules:
    """What a run does besides its straggler policy."""

    policy: StragglerPolicy
    rounds: int  # commits wanted
    seed: int = 0
    evaluate_server_every: int = 0  # versions; 0: never; the last version always is when this is not 0
    evaluate_clients_every: int = 0
    evaluate_clients_max: int = 0  # 0: everyone who is connected
    evaluation_deadline: float = 60.0  # seconds for the clients' answers


class RunMachine:
    """See the module docstring for the diagram. `ledger` may be a snapshot."""

    def __init__(self, rules: RunRules, ledger: Ledger | None = None) -> None:
        self.rules = rules
        self.ledger = ledger or Ledger()
        self.round: Round | None = None

    # ------------------------------------------------------------ the driver's side

    @property
    def deadline(self) -> float | None:
        """When the driver must deliver TimePassed; None when nothing is timed."""
        if self.ledger.state is not RunState.RUNNING:
            return None
        if self.round is not None:
            return self.round.deadline
        return self.ledger.evaluation.deadline if self.ledger.evaluation else None

    @property
    def may_snapshot(self) -> bool:
        """Whether the ledger is all there is: no round is open."""
        return self.round is None

    def record_of(self, round_id: RoundId) -> RoundRecord | None:
        """The record of the open round or of one of the last few."""
        if self.round is not None and self.round.record.round_id == round_id:
            return self.round.record
        return self.ledger.past.get(round_id)

    def refusal(self, update: Update) -> tuple[RejectReason, str] | None:
        """Why an update can be refused without its bytes, and without anything to write down; None otherwise."""
        if self.is_accepted(update):
            return None
        record = self.record_of(update.round_id)
        return self._fault_before_the_round(update, record, record.clients.get(update.client_id) if record else None)

    def is_accepted(self, update: Update) -> bool:
        """Whether this very update was accepted before, so that only its answer was lost."""
        record = self.record_of(update.round_id)
        client = record.clients.get(update.client_id) if record else None
        return client is not None and client.digest == update.digest

    def is_hopeless(self, update: Update) -> bool:
        """Whether what the update claims of itself will be refused, so that its bytes need not come."""
        record = self.record_of(update.round_id)
        policy = self.rules.policy
        return record is None or fault_of(update, base_version=record.base_version, policy=policy) is not None

    def receive(self, event: Event, now: float) -> Effects:
        """Advance by one event. A deadline that has passed takes effect first, however late the driver wakes.

        Anything a client can do wrong is answered with an effect (Reject, Release); a repeated upload of an accepted
        update, recognised by its digest, is answered Accept again and counts once.

        Raises:
            AssertionError: the driver broke its contract (time ran backwards, an answer that nobody asked for): our
                bug, never a client's doing.
        """
        assert now >= self.ledger.now, (now, self.ledger.now)
        self.ledger.now = now
        effects: list[Effect] = []
        if isinstance(event, CoordinatorStarted):
            effects += self._coordinator_started(event, now)
        while self.deadline is not None and now >= self.deadline:
            effects += self._after(self._time_passed(now), now)
        if not isinstance(event, CoordinatorStarted | TimePassed):
            effects += self._after(self._on(event, now), now)
        return tuple(effects)

    # ------------------------------------------------------------ routing

    def _on(self, event: Event, now: float) -> Effects:
        match event:
            case ClientJoined():
                return self._client_joined(event, now)
            case ClientDisconnected(client_id, session):
                if self.ledger.membership.disconnected(client_id, session) and self.round is not None:
                    return self.round.client_disconnected(client_id, now)
            case ClientLost(client_id, reason):
                return self._client_lost(client_id, reason, now)
            case UploadBegun(client_id, round_id) if round_ := self._open(round_id):
                return round_.upload_begun(client_id, now)
            case UpdateReceived(update):
                return self._update_received(update, now)
            case ClientFailed(client_id, round_id, reason, detail):
                return self._gave_up(client_id, round_id, Fate.FAILED, reason, detail, now)
            case UpdateRefused(client_id, round_id, reason, detail):
                return self._gave_up(client_id, round_id, Fate.REFUSED, reason, detail, now)
            case _:
                return self._on_progress(event, now)
        return ()

    def _on_progress(self, event: Event, now: float) -> Effects:
        match event:
            case RunStarted(model_digest):
                assert self.ledger.state is RunState.QUEUED, self.ledger.state
                self.ledger.state, self.ledger.model_digest = RunState.RUNNING, model_digest
                return self._next_round_or_end()
            case RoundDue():
                return self._round_due(now)
            case CohortDrawn(round_id, clients) if round_ := self._open(round_id):
                return round_.cohort_drawn(clients, now)
            case SamplerFailed(round_id, detail) if round_ := self._open(round_id):
                return round_.sampler_failed(detail, now)
            case Aggregated(round_id, model_digest) if round_ := self._open(round_id):
                return round_.aggregated(model_digest, now)
            case AggregationFailed(round_id, detail) if round_ := self._open(round_id):
                return round_.aggregation_failed(detail, now)
            case _:
                return self._on_evaluation_or_operator(event, now)

    def _on_evaluation_or_operator(self, event: Event, now: float) -> Effects:
        match event:
            case ModelEvaluated(version):
                if version in self.ledger.unevaluated:
                    self.ledger.unevaluated.remove(version)
                    return self._end_when_done()
            case ClientEvaluated():
                if self.ledger.evaluation is not None:
                    self.ledger.evaluation.answered(event)
                    return self._close_evaluation_when_complete()
            case StopRequested(reason):
                return self._stop(reason, now)
            case ResumeRequested() if self.ledger.state in (RunState.STOPPED, RunState.FAILED):
                self.ledger.state, self.ledger.cause, self.ledger.failures = RunState.RUNNING, "", 0
                self.ledger.membership.everyone_disconnected()  # who is there is told again now
                return self._next_round_or_end()
        return ()  # an answer that nobody waits for any more

    def _open(self, round_id: RoundId) -> Round | None:
        return self.round if self.round is not None and self.round.record.round_id == round_id else None

    def _time_passed(self, now: float) -> Effects:
        if self.round is not None:
            return self.round.time_passed(now)
        assert self.ledger.evaluation is not None
        return self._close_evaluation()

    def _coordinator_started(self, event: CoordinatorStarted, now: float) -> Effects:
        """Nobody is connected; deadlines move by the downtime; what was under way is given out again."""
        ledger = self.ledger
        ledger.membership.everyone_disconnected()
        if ledger.state is not RunState.RUNNING:
            return ()
        effects: list[Effect] = [EvaluateModel(version) for version in ledger.unevaluated]
        if self.round is not None:
            effects += self.round.coordinator_started(event.down_since, now)
        if ledger.evaluation is not None:
            down = min(max(0.0, now - event.down_since), self.rules.policy.outage_max)
            ledger.evaluation.deadline += down
        if ledger.is_round_due:
            effects.append(OpenNextRound())
        return tuple(effects)

    # ------------------------------------------------------------ clients

    def _client_joined(self, event: ClientJoined, now: float) -> Effects:
        client_id = event.client_id
        self.ledger.membership.joined(client_id, event.session, event.profile)
        effects: list[Effect] = [r for round_id in event.working_on for r in self._release(client_id, round_id)]
        if self.round is not None:
            effects += self.round.client_joined(client_id, now)
            effects += self.round.look_for_cohort()
        evaluation = self.ledger.evaluation
        if evaluation and evaluation.is_waiting_for(client_id):
            effects.append(evaluation.ask(client_id, self.ledger.membership.counted_round(client_id)))
        return tuple(effects)

    def _release(self, client_id: ClientId, round_id: RoundId) -> Effects:
        """Tell a client that came back whether what it still works on is wanted; nothing when it is."""
        record = self.record_of(round_id)
        client = record.clients.get(client_id) if record else None
        if client is not None and client.digest is not None:
            return ()  # it counts already; the client will ask for its answer
        if record is None or client is None:
            was_long_ago = record is None and round_id < self.ledger.next_round
            reason = ReleaseReason.ROUND_CLOSED if was_long_ago else ReleaseReason.NOT_INVITED
            return (Release(client_id, round_id, reason),)
        if self._open(round_id) and record.phase is Phase.COLLECTING:
            return ()
        reason = ReleaseReason.ROUND_ABANDONED if record.phase is Phase.ABANDONED else ReleaseReason.ROUND_CLOSED
        submit = self.rules.policy.late == "next_round" and self.ledger.state is RunState.RUNNING
        return (Release(client_id, round_id, reason, submit),)

    def _client_lost(self, client_id: ClientId, reason: str, now: float) -> Effects:
        self.ledger.membership.lost(client_id, reason)
        effects: Effects = ()
        if self.round is not None:
            effects = self.round.client_gave_up(client_id, Fate.LOST, reason, "", now)
        if self.ledger.evaluation is not None:
            self.ledger.evaluation.lost(client_id, reason)
            return (*effects, *self._close_evaluation_when_complete())
        return effects

    def _gave_up(
        self, client_id: ClientId, round_id: RoundId, fate: Fate, reason: str, detail: str, now: float
    ) -> Effects:
        if round_ := self._open(round_id):
            return round_.client_gave_up(client_id, fate, reason, detail, now)
        record = self.ledger.past.get(round_id)
        client = record.clients.get(client_id) if record else None
        if client is None or client.digest is not None or client.fate not in (Fate.STRAGGLER, Fate.RELEASED):
            return ()
        client.reason, client.detail = reason, detail  # why it was slow, learnt too late to matter
        return (AmendRecord(round_id),)

    # ------------------------------------------------------------ updates

    def _update_received(self, update: Update, now: float) -> Effects:
        record = self.record_of(update.round_id)
        client = record.clients.get(update.client_id) if record else None
        if record is not None and client is not None and client.digest == update.digest:
            return (Accept(update.client_id, update.round_id, update.digest, client.fate is Fate.CARRIED),)
        if fault := self._fault_before_the_round(update, record, client):
            return (Reject(update.client_id, update.round_id, update.digest, *fault),)
        assert record is not None
        assert client is not None
        round_ = self._open(update.round_id)
        if round_ is not None and round_.is_open_for(update):
            return round_.update_received(update, now)
        return self._late(update, record, client, now)

    def _fault_before_the_round(
        self, update: Update, record: RoundRecord | None, client: ClientRecord | None
    ) -> tuple[RejectReason, str] | None:
        ledger, round_id = self.ledger, update.round_id
        if ledger.state is not RunState.RUNNING:
            return RejectReason.RUN_ENDED, f"the run is {ledger.state}: {ledger.cause}"
        if not 1 <= round_id < ledger.next_round:
            return RejectReason.WRONG_ROUND, f"round {round_id} is not in 1..{ledger.next_round - 1}"
        if record is None:
            return RejectReason.TOO_LATE, f"round {round_id} ended long ago"
        if client is None:
            return RejectReason.NOT_INVITED, f"{update.client_id} was not invited to round {round_id}"
        if client.digest is not None:
            return RejectReason.ALREADY_REPORTED, f"another update of yours was accepted in round {round_id}"
        if client.fate is Fate.REFUSED:
            return RejectReason.ALREADY_REPORTED, f"your update of round {round_id} was refused: {client.reason}"
        if client.fate is Fate.LATE:
            return RejectReason(client.reason), client.detail
        return None

    def _late(self, update: Update, record: RoundRecord, client: ClientRecord, now: float) -> Effects:
        """The round no longer takes it: refuse, or carry it into the next round that commits (DESIGN section 4)."""
        ledger, policy = self.ledger, self.rules.policy
        open_round = self._takes_late(update.round_id)
        next_base = ledger.version + (self.round is not None and open_round is None)  # of the commit it can count in
        if policy.late == "discard":
            return self._refuse_late(update, record, RejectReason.TOO_LATE, _how_late(record, now), now)
        if next_base >= self.rules.rounds or ledger.stop_reason is not None:
            return self._refuse_late(update, record, RejectReason.TOO_LATE, "no round follows", now)
        if fault := fault_of(update, base_version=record.base_version, policy=policy):
            return self._refuse_late(update, record, *fault, now)
        if next_base - update.base_version > policy.max_staleness:
            detail = f"{next_base - update.base_version} versions old, max_staleness is {policy.max_staleness}"
            return self._refuse_late(update, record, RejectReason.TOO_STALE, detail, now)
        effects: list[Effect] = [Accept(update.client_id, update.round_id, update.digest, carried=True)]
        note_accepted(client, update)
        effects += self._change_fate(update, record, Fate.CARRIED, "", _how_late(record, now), now)
        effects += ledger.carry(update, into=None if open_round is None else open_round.late)
        return tuple(effects)

    def _takes_late(self, round_id: RoundId) -> Round | None:
        """The open round, if a late update of round `round_id` still counts in it."""
        if self.round is None or self.round.phase is Phase.AGGREGATING or self._open(round_id):
            return None
        return self.round

    def _refuse_late(
        self, update: Update, record: RoundRecord, reason: RejectReason, detail: str, now: float
    ) -> Effects:
        effects = self._change_fate(update, record, Fate.LATE, reason, detail, now)
        return (Reject(update.client_id, update.round_id, update.digest, reason, detail), *effects)

    def _change_fate(
        self, update: Update, record: RoundRecord, fate: Fate, reason: str, detail: str, now: float
    ) -> Effects:
        client = record.clients[update.client_id]
        if client.fate is Fate.WAITING:  # its round is in the grace period for others
            assert self.round is not None
            return self.round.client_gave_up(update.client_id, fate, reason, detail, now)
        client.fate, client.fate_at, client.reason, client.detail = fate, now, reason, detail
        return (AmendRecord(record.round_id),) if self._open(record.round_id) is None else ()

    # ------------------------------------------------------------ from round to round

    def _round_due(self, now: float) -> Effects:
        ledger = self.ledger
        if not ledger.is_round_due or ledger.state is not RunState.RUNNING:
            return ()
        ledger.is_round_due = False
        ledger.forget_old_rounds(most=max(3, self.rules.policy.max_staleness + 2))
        late, ledger.carried = ledger.carried, {}
        self.round = Round(ledger.next_round, ledger.version, self.rules.policy, ledger.membership, late, now)
        ledger.next_round = RoundId(ledger.next_round + 1)
        return self.round.look_for_cohort()

    def _after(self, effects: Effects, now: float) -> Effects:
        """A round that ended hands over to the run."""
        more: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Commit):
                more += self._committed(effect, now)
            elif isinstance(effect, Abandon):
                more += self._abandoned(effect)
        return (*effects, *more)

    def _committed(self, commit: Commit, now: float) -> Effects:
        ledger, round_ = self.ledger, self._take_round()
        ledger.version, ledger.model_digest, ledger.failures = commit.version, commit.model_digest, 0
        effects = ledger.settle_committed(round_.record, round_.late)
        ledger.past[round_.record.round_id] = round_.record
        return (*effects, *self._evaluate(now), *self._next_round_or_end())

    def _abandoned(self, abandon: Abandon) -> Effects:
        ledger, round_ = self.ledger, self._take_round()
        record, stopped = round_.record, abandon.reason is AbandonReason.STOP_REQUESTED
        carry = self.rules.policy.late == "next_round" and not stopped
        effects = ledger.settle_abandoned(round_, carry=carry)
        ledger.past[record.round_id] = record
        if stopped:
            return (*effects, *self._end(RunState.STOPPED, record.detail))
        ledger.failures += 1
        if ledger.failures > self.rules.policy.retry and ledger.stop_reason is None:
            cause = f"{ledger.failures} rounds in a row were abandoned; the last, round {record.round_id}: "
            return (*effects, *self._end(RunState.FAILED, f"{cause}{abandon.reason} ({record.detail})"))
        return (*effects, *self._next_round_or_end())

    def _take_round(self) -> Round:
        assert self.round is not None
        round_, self.round = self.round, None
        return round_

    def _next_round_or_end(self) -> Effects:
        ledger = self.ledger
        if ledger.stop_reason is not None:
            return self._end(RunState.STOPPED, ledger.stop_reason)
        if ledger.evaluation is not None:
            return ()
        if ledger.version >= self.rules.rounds:
            return self._end_when_done()
        ledger.is_round_due = True
        return (OpenNextRound(),)

    def _end_when_done(self) -> Effects:
        ledger = self.ledger
        if ledger.state is not RunState.RUNNING or ledger.version < self.rules.rounds:
            return ()
        if self.round is not None or ledger.evaluation is not None or ledger.unevaluated:
            return ()
        return self._end(RunState.FINISHED, f"{self.rules.rounds} rounds are committed")

    def _stop(self, reason: str, now: float) -> Effects:
        ledger = self.ledger
        if ledger.state is not RunState.RUNNING:
            return ()
        if self.round is None:
            return self._end(RunState.STOPPED, reason)
        if self.round.phase is Phase.AGGREGATING:
            ledger.stop_reason = reason  # what was accepted is first made a model
            return ()
        return self.round.stop(reason, now)

    def _end(self, state: RunState, cause: str) -> Effects:
        ledger = self.ledger
        effects = ledger.settle_end(state)
        ledger.state, ledger.cause, ledger.stop_reason = state, cause, None
        ledger.evaluation, ledger.unevaluated, ledger.is_round_due = None, [], False
        ledger.membership.everyone_disconnected()  # from here on the run is not told who comes and goes
        return (*effects, EndRun(state, cause))

    # ------------------------------------------------------------ evaluation

    def _evaluate(self, now: float) -> Effects:
        """What the committed version is to be run on: the server's own data, the clients' ledger."""
        ledger, rules = self.ledger, self.rules
        is_last = ledger.version >= rules.rounds
        effects: list[Effect] = []
        every = rules.evaluate_server_every
        if every and (ledger.version % every == 0 or is_last):
            ledger.unevaluated.append(ledger.version)
            effects.append(EvaluateModel(ledger.version))
        every = rules.evaluate_clients_every
        if every and (ledger.version % every == 0 or is_last):
            connected, most = ledger.membership.connected(), rules.evaluate_clients_max
            asked = clients_to_ask(connected, most=most, seed=rules.seed, version=ledger.version)
            if asked:
                evaluation = ClientEvaluation(ledger.version, now + rules.evaluation_deadline, asked)
                effects += [evaluation.ask(c, ledger.membership.counted_round(c)) for c in asked]
                ledger.evaluation = evaluation
        return tuple(effects)

    def _close_evaluation_when_complete(self) -> Effects:
        evaluation = self.ledger.evaluation
        return self._close_evaluation() if evaluation and evaluation.is_complete else ()

    def _close_evaluation(self) -> Effects:
        evaluation, self.ledger.evaluation = self.ledger.evaluation, None
        assert evaluation is not None
        return (evaluation.close(), *self._next_round_or_end())


def _how_late(record: RoundRecord, now: float) -> str:
    since = record.closed_at or record.ended_at or record.deadline or now
    return f"{now - since:.1f} s after round {record.round_id} had closed"

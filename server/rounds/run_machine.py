"""A run as a pure state machine: one round after another, late updates, evaluations, one end with one cause.

It owns the round that is open and the ledger of everything else, and routes every event. It is what the journal
replays: the same events at the same times give the same effects.

    QUEUED --RunStarted--> RUNNING --rounds committed, evaluations in--> FINISHED
                                   --abandoned once more than `retry`--> FAILED
                                   --StopRequested---------------------> STOPPED
                                   --PauseRequested, the round over----> PAUSED --StopRequested--> STOPPED
    FAILED, STOPPED, PAUSED --ResumeRequested--> RUNNING, or QUEUED until there is room, and ResumeRequested comes again

A pause ends nothing that has begun: a round that has invited anyone ends as it would, an evaluation too, and late
updates are taken as ever. A round that still looks for clients is abandoned; that is no failure.
"""

from atoll.protocol.vocabulary import (
    DECLINES,
    TERMINAL,
    AbandonReason,
    ClientId,
    Fate,
    Phase,
    ReleaseReason,
    RoundId,
    RunState,
    Version,
)
from atoll.server.rounds.buffer_round import Buffer
from atoll.server.rounds.client_evaluation import ClientEvaluation, clients_to_ask
from atoll.server.rounds.cohort_round import Round
from atoll.server.rounds.events import (
    Abandon,
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
    PauseRequested,
    PauseRun,
    Release,
    ResumeRequested,
    RoundDue,
    RunStarted,
    SamplerFailed,
    StopRequested,
    TimePassed,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)
from atoll.server.rounds.oort_utility import utility_of
from atoll.server.rounds.open_round import Effects, OpenRound
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.update_intake import Intake
from atoll.server.rounds.update_intake import RunRules as RunRules


class RunMachine(Intake):
    """See the module docstring for the diagram. `ledger` may be a snapshot."""

    # ------------------------------------------------------------ the driver's side

    @property
    def deadline(self) -> float | None:
        """When the driver must deliver TimePassed; None when nothing is timed."""
        if not self.ledger.is_open:
            return None
        first, own = self._round_deadline, self.invitations.deadline
        if first is None or own is None:
            return own if first is None else first
        return min(first, own)

    @property
    def _round_deadline(self) -> float | None:
        """Of the round, or of the evaluation that the next one waits for."""
        if self.round is not None:
            return self.round.deadline
        return self.ledger.evaluation.deadline if self.ledger.evaluation else None

    @property
    def may_snapshot(self) -> bool:
        """Whether the ledger is all there is: no round is open."""
        return self.round is None

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
        while (deadline := self.deadline) is not None and now >= deadline:
            effects += self._after(self._time_passed(now), now)
        if not isinstance(event, CoordinatorStarted | TimePassed):
            effects += self._after(self._on(event, now), now)
        return tuple(effects)

    # ------------------------------------------------------------ routing

    def _on(self, event: Event, now: float) -> Effects:
        match event:
            case UpdateReceived():
                return self._update_received(event.update, now)
            case UploadBegun():
                self._upload_begun(event.client_id, event.round_id, now)
            case ClientJoined():
                return self._client_joined(event, now)
            case ClientDisconnected(client_id, session):
                if self.ledger.membership.disconnected(client_id, session):
                    self._client_disconnected(client_id, now)
            case ClientLost(client_id, reason):
                return self._client_lost(client_id, reason, now)
            case ClientFailed(client_id, round_id, reason, detail):
                if reason in DECLINES:
                    self.ledger.membership.declined(client_id)
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
            case PauseRequested(reason):
                return self._pause(reason, now)
            case ResumeRequested(wait):
                return self._resume(wait=wait)
        return ()  # an answer that nobody waits for any more

    def _time_passed(self, now: float) -> Effects:
        first = self._round_deadline
        if first is None or now < first or ((own := self.invitations.deadline) is not None and own < first):
            return self.invitations.time_passed(now)
        if self.round is not None:
            return self.round.time_passed(now)
        assert self.ledger.evaluation is not None
        return self._close_evaluation()

    def _coordinator_started(self, event: CoordinatorStarted, now: float) -> Effects:
        """Nobody is connected; deadlines move by the downtime; what was under way is given out again."""
        ledger = self.ledger
        ledger.membership.everyone_disconnected()
        if not ledger.is_open:
            return ()
        self.invitations.coordinator_started(event.down_since, now)
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
        effects: list[Effect] = [*self.invitations.joined(client_id, now)]
        effects += (r for round_id in event.working_on for r in self._release(client_id, round_id))
        if self.round is not None:
            effects += self.round.client_joined(client_id, now)
        evaluation = self.ledger.evaluation
        if evaluation and evaluation.is_waiting_for(client_id):
            effects.append(evaluation.ask(client_id, self.ledger.membership.counted_round(client_id)))
        return tuple(effects)

    def _client_disconnected(self, client_id: ClientId, now: float) -> None:
        self.invitations.disconnected(client_id, now)
        if self.round is not None:
            self.round.client_disconnected(client_id, now)

    def _upload_begun(self, client_id: ClientId, round_id: RoundId, now: float) -> None:
        self.invitations.upload_begun(client_id, round_id, now)
        if round_ := self._open(round_id):
            round_.upload_begun(client_id, now)

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
        if self.rules.policy.is_asynchronous:
            return self._release_from_a_buffer(client_id, record)
        if self._open(round_id) and record.phase is Phase.COLLECTING:
            return ()
        reason = ReleaseReason.ROUND_ABANDONED if record.phase is Phase.ABANDONED else ReleaseReason.ROUND_CLOSED
        submit = self.rules.policy.late == "next_round" and self.ledger.is_open
        return (Release(client_id, round_id, reason, submit),)

    def _release_from_a_buffer(self, client_id: ClientId, record: RoundRecord) -> Effects:
        if self.invitations.is_training(client_id, record.round_id):
            return ()
        submit = self.invitations.may_still_count(record) and self.ledger.is_open
        reason = ReleaseReason.OUT_OF_TIME if submit else ReleaseReason.TOO_STALE
        return (Release(client_id, record.round_id, reason, submit),)

    def _client_lost(self, client_id: ClientId, reason: str, now: float) -> Effects:
        self.ledger.membership.lost(client_id, reason)
        effects = self.invitations.ended(client_id, None, Fate.LOST, reason, "", now)
        if self.round is not None:
            effects += self.round.client_gave_up(client_id, Fate.LOST, reason, "", now)
        if self.ledger.evaluation is not None:
            self.ledger.evaluation.lost(client_id, reason)
            return (*effects, *self._close_evaluation_when_complete())
        return effects

    def _gave_up(
        self, client_id: ClientId, round_id: RoundId, fate: Fate, reason: str, detail: str, now: float
    ) -> Effects:
        if self.invitations.is_training(client_id, round_id):
            return self.invitations.ended(client_id, round_id, fate, reason, detail, now)
        if round_ := self._open(round_id):
            return round_.client_gave_up(client_id, fate, reason, detail, now)
        record = self.ledger.past.get(round_id)
        client = record.clients.get(client_id) if record else None
        if client is None or client.digest is not None or client.fate not in (Fate.STRAGGLER, Fate.RELEASED):
            return ()
        client.reason, client.detail = reason, detail  # why it was slow, learnt too late to matter
        return (AmendRecord(round_id),)

    # ------------------------------------------------------------ from round to round

    def _round_due(self, now: float) -> Effects:
        ledger = self.ledger
        if not ledger.is_round_due or ledger.state is not RunState.RUNNING:
            return ()
        ledger.is_round_due = False
        self.round = self._buffer(now) if self.rules.policy.is_asynchronous else self._round_with_cohort(now)
        ledger.next_round = RoundId(ledger.next_round + 1)
        return ()

    def _round_with_cohort(self, now: float) -> Round:
        ledger = self.ledger
        ledger.forget_old_rounds(most=max(3, self.rules.policy.max_staleness + 2))
        late, ledger.carried = ledger.carried, {}
        return Round(ledger.next_round, ledger.version, self.rules.policy, ledger.membership, late, now)

    def _buffer(self, now: float) -> Buffer:
        ledger, policy = self.ledger, self.rules.policy
        ledger.forget_old_rounds(most=3, oldest_base=Version(ledger.version - policy.max_staleness))
        in_, ledger.waiting = ledger.waiting[: policy.num_wanted], ledger.waiting[policy.num_wanted :]
        return Buffer(ledger.next_round, ledger.version, policy, ledger.membership, self.invitations, in_, now)

    def _after(self, effects: Effects, now: float) -> Effects:
        """A round sees what is left for it to do; one that ended hands over to the run."""
        if self.round is not None:
            effects += self.round.look_for_clients(now)
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
        self._pace(round_, commit)
        effects = self._settle_committed(round_)
        ledger.past[round_.record.round_id] = round_.record
        released = self._release_after_commit(now)
        return (*effects, *released, *self._evaluate(now), *self._next_round_or_end())

    def _pace(self, round_: OpenRound, commit: Commit) -> None:
        """By what is in the model: of two updates of one client the older waits in vain."""
        if window := self.rules.pacer_window:
            used = [utility_of(update) for update in round_.held if update.digest in commit.used]
            self.ledger.membership.pacer.committed(used, window)

    def _settle_committed(self, round_: OpenRound) -> list[Effect]:
        if isinstance(round_, Round):
            return self.ledger.settle_committed(round_.record, round_.late)
        return self.ledger.settle_buffer_committed(round_.record)

    def _release_after_commit(self, now: float) -> Effects:
        """Who trains goes on, but for those whose update can count in no later commit."""
        if self.ledger.version >= self.rules.rounds:
            return self.invitations.release_all(ReleaseReason.ROUND_CLOSED, now)
        return self.invitations.release_stale(now)

    def _abandoned(self, abandon: Abandon) -> Effects:
        ledger, round_ = self.ledger, self._take_round()
        record, stopped = round_.record, abandon.reason is AbandonReason.STOP_REQUESTED
        carry = self.rules.policy.late == "next_round" and not stopped
        if isinstance(round_, Round):
            effects = ledger.settle_abandoned(round_, carry=carry)
        else:
            effects = ledger.settle_buffer_abandoned(record, [*round_.held])
        ledger.past[record.round_id] = record
        if stopped:
            return (*effects, *self._end(RunState.STOPPED, record.detail))
        ledger.failures += abandon.reason is not AbandonReason.PAUSE_REQUESTED
        if ledger.failures > self.rules.policy.retry and ledger.stop_reason is None:
            cause = f"{ledger.failures} rounds in a row were abandoned; the last, round {record.round_id}: "
            return (*effects, *self._end(RunState.FAILED, f"{cause}{abandon.reason} ({record.detail})"))
        return (*effects, *self._next_round_or_end())

    def _take_round(self) -> OpenRound:
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
        if ledger.pause_reason is not None:
            ledger.state, ledger.cause, ledger.pause_reason = RunState.PAUSED, ledger.pause_reason, None
            ledger.is_round_due = False
            return (PauseRun(ledger.cause),)
        ledger.is_round_due = True
        return (OpenNextRound(),)

    def _end_when_done(self) -> Effects:
        ledger = self.ledger
        if ledger.state is not RunState.RUNNING or ledger.version < self.rules.rounds:
            return ()
        if self.round is not None or ledger.evaluation is not None or ledger.unevaluated:
            return ()
        return self._end(RunState.FINISHED, f"{self.rules.rounds} rounds are committed")

    # ------------------------------------------------------------ the operator

    def _pause(self, reason: str, now: float) -> Effects:
        ledger = self.ledger
        is_ending = ledger.stop_reason is not None or (self.round is None and ledger.version >= self.rules.rounds)
        if ledger.state is not RunState.RUNNING or is_ending:
            return ()
        ledger.pause_reason = reason
        if self.round is not None:
            return () if self.round.has_begun else self.round.pause(reason, now)
        return self._next_round_or_end()

    def _resume(self, *, wait: bool) -> Effects:
        ledger = self.ledger
        if ledger.state is RunState.RUNNING:
            ledger.pause_reason = None  # it was to pause, and goes on instead
        if ledger.state in (RunState.RUNNING, RunState.FINISHED) or not ledger.model_digest:
            return ()
        if ledger.state in TERMINAL:
            ledger.failures = 0
            ledger.membership.everyone_disconnected()  # who is there is told again now
        ledger.state, ledger.cause = RunState.QUEUED if wait else RunState.RUNNING, ""
        return () if wait else self._next_round_or_end()

    def _stop(self, reason: str, now: float) -> Effects:
        ledger = self.ledger
        if not ledger.is_open:
            return ()
        if self.round is None:
            return self._end(RunState.STOPPED, reason)
        effects = () if self.round.phase is Phase.AGGREGATING else self.round.stop(reason, now)
        if self.round.phase is Phase.AGGREGATING:
            ledger.stop_reason = reason  # what was accepted is first made a model
        return effects

    def _end(self, state: RunState, cause: str) -> Effects:
        ledger = self.ledger
        effects = [*self.invitations.release_all(ReleaseReason.RUN_ENDED, ledger.now), *ledger.settle_end(state)]
        ledger.state, ledger.cause, ledger.stop_reason, ledger.pause_reason = state, cause, None, None
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
            connected = (c for c in ledger.membership.connected() if not self.invitations.is_training(c))
            most = rules.evaluate_clients_max
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


def what_a_pause_waits_for(machine: RunMachine) -> str:
    """Until when a run that is to pause goes on; empty when it rests, or is not to."""
    if machine.ledger.pause_reason is None:
        return ""
    if machine.round is None:
        return "it pauses when its clients' evaluation is over"
    return f"it pauses when round {machine.round.record.round_id} is over"

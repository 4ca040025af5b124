"""A run as a pure state machine: one round after another, late updates, evaluations, one end with one cause.

The machine owns the open round and the ledger of everything else, and routes each event by a table, `HANDLERS`. The
journal replays it: the same events at the same times give the same effects.

    QUEUED --RunStarted--> RUNNING --rounds committed, evaluations in--> FINISHED, or earlier by an early stop
                                   --abandoned once more than `retry`--> FAILED, or PAUSED (`on_failure`)
                                   --FilesLost without a model---------> FAILED
                                   --StopRequested---------------------> STOPPED
                                   --PauseRequested, the round over----> PAUSED --StopRequested--> STOPPED
    FAILED, STOPPED, PAUSED --ResumeRequested--> RUNNING, or QUEUED until there is room, and ResumeRequested comes again

A finished run resumes only with more rounds. A pause interrupts nothing that has begun: a round that has invited
clients and an evaluation end as usual, and late updates are accepted. A round that still waits for clients is
abandoned, which does not count as a failure.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast, get_args

from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import (
    TERMINAL,
    AbandonReason,
    Digest,
    FailureReason,
    Fate,
    Phase,
    ReleaseReason,
    RoundId,
    RunState,
    Version,
)
from atoll.server.invariants import Violation
from atoll.server.rounds.buffer_round import Buffer
from atoll.server.rounds.cohort_round import Round
from atoll.server.rounds.evaluations import Evaluations
from atoll.server.rounds.events import (
    Abandon,
    Aggregated,
    AggregationFailed,
    AmendRecord,
    AuditCharge,
    ClientDisconnected,
    ClientEvaluated,
    ClientFailed,
    ClientJoined,
    ClientLost,
    CohortDrawn,
    Commit,
    CoordinatorStarted,
    DiskFree,
    DiskShort,
    Effect,
    EndRun,
    EvaluateModel,
    Event,
    FilesLost,
    MetricsComputed,
    ModelEvaluated,
    NoiseRow,
    OpenNextRound,
    PauseRequested,
    PauseRun,
    PublishedNamed,
    ResumeRequested,
    ResumeRun,
    RoundDue,
    RunStarted,
    SamplerFailed,
    StopRequested,
    TimePassed,
    Update,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
    set_digest,
)
from atoll.server.rounds.oort_utility import utility_of
from atoll.server.rounds.open_round import NEWS_S, Effects, OpenRound
from atoll.server.rounds.record import RoundRecord, cause_of_misfits
from atoll.server.rounds.retries import COSTS_NO_RETRY, seconds_to_retry
from atoll.server.rounds.session_events import SessionEvent, SessionLeft

if TYPE_CHECKING:
    from atoll.server.rounds.secure_round import SecureRound


class RunMachine(Evaluations):
    """State machine of one run; the module's docstring has the diagram. `ledger` may come from a snapshot."""

    # ------------------------------------------------------------ the driver's side

    @property
    def deadline(self) -> float | None:
        """The time at which the driver must deliver TimePassed [s since the epoch]; None: no timer runs."""
        ledger = self.ledger
        if not ledger.is_open:
            return None
        if ledger.short_since is not None:
            return ledger.short_look
        earliest = self._round_deadline
        others = []
        if ledger.training:
            others.append(self.invitations.deadline)
        if ledger.membership.next_wake is not None:
            others.append(self._next_wake)
        for deadline in others:  # most runs have none, and this is called twice for each event
            if deadline is not None and (earliest is None or deadline < earliest):
                earliest = deadline
        return earliest

    @property
    def _round_deadline(self) -> float | None:
        """The deadline of the open round, or of the evaluation after which the next round opens."""
        if self.round is not None:
            return self.round.deadline
        return self._evaluation_deadline

    @property
    def _next_wake(self) -> float | None:
        """The end of the next client's rest, while the open round may invite it."""
        return self.ledger.membership.next_wake if self.round is not None and self.round.may_draw else None

    @property
    def newest_released(self) -> RoundId:
        """The newest round that may have released updates of private sums, as far as the kept records tell.

        Where the clients add the noise, an attempt at a sum releases them, whether a version follows or not.
        """
        ledger, privacy = self.ledger, self.rules.privacy
        is_by_attempt = privacy is not None and privacy.noise_by == "clients"
        return RoundId(ledger.next_round - 1) if is_by_attempt else ledger.newest_published

    @property
    def may_snapshot(self) -> bool:
        """Return whether the ledger is the whole state: no round is open."""
        return self.round is None

    def receive(self, event: Event, now: float) -> Effects:
        """Advance by one event and return its effects. A deadline that has passed takes effect before the event.

        Every mistake of a client is answered by an effect (Reject, Release). A repeated upload of an accepted update,
        recognised by its digest, is answered by Accept again and counts once.

        Args:
            event: the event to handle.
            now: its time [s since the epoch], not before the time of the last event.

        Raises:
            AssertionError: the driver broke its contract (time ran backward, an answer without a request): a bug, never
                a client's mistake.
        """
        assert now >= self.ledger.now, (now, self.ledger.now)
        self.ledger.now = now
        effects = self._coordinator_started(event, now) if isinstance(event, CoordinatorStarted) else ()
        if isinstance(event, PublishedNamed):  # no deadline may close a round whose clients have spent their budgets
            effects = self._after(self._published_named(event, now), now)
        while (deadline := self.deadline) is not None and now >= deadline:
            effects += self._after(self._time_passed(now), now)
        if (kind := type(event)) is CoordinatorStarted or kind is TimePassed or kind is PublishedNamed:
            return effects
        return effects + self._after(HANDLERS[kind](self, event, now), now)

    def validate(self) -> None:
        """Check architecture, invariants 1 to 5, as far as a state can break them; raises Violation."""
        ledger = self.ledger
        ledger.validate()
        ledger.membership.validate()
        stands_still = not ledger.is_open or ledger.short_since is not None  # but a rest may end during a draw
        for deadline in () if stands_still else (self._round_deadline, self.invitations.deadline):
            if deadline is not None and deadline <= ledger.now:
                raise Violation(4, f"the deadline {deadline} has passed without an effect at {ledger.now}")
        if self.round is not None:
            record = self.round.record
            facts = (record.round_id, record.base_version, ledger.state)
            if facts != (ledger.next_round - 1, ledger.version, RunState.RUNNING) or record.round_id in ledger.past:
                raise Violation(5, f"round, base and state are {facts}", f"round {record.round_id}")
            self.round.validate()
        elif ledger.state is RunState.RUNNING:
            awaited = (ledger.is_round_due, ledger.evaluation, ledger.unevaluated, ledger.computing)
            if not any(awaited):
                raise Violation(4, "the run neither ends nor opens a round, and awaits nothing")
        self.invitations.validate()
        super().validate()

    # ------------------------------------------------------------ time

    def _time_passed(self, now: float) -> Effects:
        """Apply the earliest deadline: of a rest, of an invitation, of the round or of the evaluation."""
        if self.ledger.short_since is not None:
            return self._wait_for_room(now)
        if (wake := self._next_wake) is not None and now >= wake:
            self.ledger.membership.wake(now)
            return ()
        first = self._round_deadline
        if first is None or now < first or ((invited := self.invitations.deadline) is not None and invited < first):
            return self.invitations.time_passed(now)
        if self.round is not None:
            return self.round.time_passed(now)
        assert self.ledger.evaluation is not None
        return self._evaluation_overdue(now)

    def _coordinator_started(self, event: CoordinatorStarted, now: float) -> Effects:
        """Disconnect all clients, extend the deadlines by the downtime, and repeat pending effects."""
        ledger = self.ledger
        ledger.membership.everyone_disconnected(min(now, event.down_since))
        if not ledger.is_open:
            return ()
        self._stood_still_until(min(now, event.down_since))
        self.invitations.coordinator_started(event.down_since, now)
        effects: list[Effect] = [*(EvaluateModel(version) for version in ledger.unevaluated), *ledger.computing]
        if self.round is not None:
            effects += self.round.coordinator_started(event.down_since, now)
        down = min(max(0.0, now - event.down_since), self.rules.policy.outage_max)
        self._extend_evaluation(down)
        if (sums := self.sums_of_evaluation) is not None:
            effects += sums.pending()
        if ledger.is_round_due:
            effects.append(OpenNextRound(ledger.retry_at))
        return tuple(effects)

    def _published_named(self, event: PublishedNamed, now: float) -> Effects:
        """Charge all clients for each round after the backup's last closed one, as if they had been in its sums.

        An open round is abandoned: its clients may have spent their budgets since. One that aggregates was closed
        before the backup, and its charge stays; it counts among the later rounds, too, as another fold of it would be
        another release if the secret of the noise was not in the backup. Where the clients add the noise, each attempt
        of these rounds may have been charged, also of one without a version. In asynchronous modes a client may also
        have been in a sum with an update from each older version for which it was asked. A run with correlated noise
        has no later round: all uses count. No resume raises what a round may cost, so the settings of the backup do.
        """
        ledger, privacy = self.ledger, self.rules.privacy
        if privacy is None or ledger.restoration == event.restoration:
            return ()
        ledger.restoration = event.restoration
        closed = ledger.next_round - (1 if self.round is None else 2)
        if (number := event.round_id - closed) <= 0:
            return ()
        membership, uses = ledger.membership, number * self.rules.charges_max
        membership.charge_all(max(uses, privacy.participations_max if privacy.earlier else 0), privacy)
        for client_id in self.invitations.older() if self.rules.policy.is_asynchronous else ():
            membership.charge(client_id, privacy)
        charge = privacy.charged(len(membership.members), membership.most_spent, membership.most_uses)
        rounds = f"rounds {closed + 1} to {event.round_id}"
        effects: Effects = (AuditCharge(rounds, charge),)
        if privacy.earlier:  # the noises of those rounds are not known here, so no later one can take them off
            why = f"{rounds} came after the restored backup, and the noise of later rounds would need theirs"
            if self.round is not None:
                return effects + self.round.end_after_restoration(why, now)  # the run ends: no client has a budget
            return effects + self._end(RunState.FINISHED, why)
        if self.round is not None and self.round.phase is not Phase.AGGREGATING:
            return effects + self.round.end_after_restoration(f"{rounds} were charged to all clients", now)
        if ledger.is_round_due:
            ledger.is_round_due = False
            effects += self._next_round_or_end()
        return effects

    def _disk_short(self, event: DiskShort, now: float) -> Effects:
        ledger = self.ledger
        if ledger.is_open and ledger.short_since is None:
            ledger.short_since, ledger.short_of = now, event.detail
            ledger.short_look = min(now + NEWS_S, self._short_until)
        return ()

    def _disk_free(self, event: DiskFree, now: float) -> Effects:
        ledger, is_ended_by_it = self.ledger, self.ledger.short_since is not None and self.ledger.resumes_itself
        effects = self._stood_still_until(now)
        if is_ended_by_it and ledger.state is RunState.RUNNING:  # the pause has not taken effect
            ledger.pause_reason, ledger.resumes_itself = None, False
        return (*effects, ResumeRun()) if is_ended_by_it and ledger.state is RunState.PAUSED else effects

    def _wait_for_room(self, now: float) -> Effects:
        """Keep waiting for disk space or, after the longest allowed wait, fail or pause the run."""
        ledger, until = self.ledger, self._short_until
        ledger.short_look = now + NEWS_S if now >= until else min(now + NEWS_S, until)
        has_all = self.round is None and ledger.version >= self.rules.rounds
        if now < until or ledger.state is not RunState.RUNNING or ledger.resumes_itself or has_all:
            return ()
        cause = f"it has waited for disk space: {ledger.short_of}"
        if self.round is not None:
            return self.round.end_without_room(cause, now)
        return self._waited_in_vain(cause)

    @property
    def _short_until(self) -> float:
        """The latest end of a wait for disk space [s since the epoch]; infinite: no wait, or an unlimited one."""
        wait, since = self.rules.wait, self.ledger.short_since
        return math.inf if since is None or wait is None or wait.most is None else since + wait.most

    def _files_lost(self, event: FilesLost, now: float) -> Effects:
        """Continue without accepted updates and versions whose files are lost; end the run if its model is lost."""
        ledger, digests = self.ledger, frozenset(event.updates)
        ledger.lost = sorted({*ledger.lost, *event.versions})
        if ledger.best is not None and ledger.best.version in ledger.lost:
            ledger.best = None
        effects = self._lose_updates(digests, event.detail, now)
        if self._has_no_model:
            detail = f"a version of the model that no round can do without is lost: {event.detail}"
            return (*effects, *(self.round.end_without_files(detail, now) if self.round else self._end_if_open(detail)))
        if self.round is not None:
            effects += self.round.lose(digests, now)
        if event.versions and ledger.training:
            effects += self.invitations.release_stale(next(self.newest_first()), now)
        return effects

    @property
    def _has_no_model(self) -> bool:
        """Return whether the current version is lost, or the first one, which every fold reads."""
        return bool({Version(0), self.ledger.version}.intersection(self.ledger.lost))

    def _end_if_open(self, cause: str) -> Effects:
        return () if self.ledger.state in TERMINAL else self._end(RunState.FAILED, cause)

    def _lose_updates(self, digests: frozenset[Digest], why: str, now: float) -> Effects:
        """Record the loss of updates that wait for a commit; updates of the open round remain in it."""
        ledger, effects = self.ledger, list[Effect]()
        open_buffer = self.round if isinstance(self.round, Buffer) and self.round.is_open else None
        no_round = [*ledger.waiting, *(() if open_buffer is None else open_buffer.held)]
        effects += self._charged_in_vain(update for update in no_round if update.digest in digests)
        held = [*ledger.carried.values(), *ledger.waiting, *(self.round.held if self.round is not None else ())]
        for update in [update for update in held if update.digest in digests]:
            if (record := self.record_of(update.round_id)) is None:
                continue
            record.clients[update.client_id].lose(f"lost after it was accepted: {why}", now)
            effects += [AmendRecord(update.round_id)] if self._open(update.round_id) is None else []
        ledger.carried = {c: update for c, update in ledger.carried.items() if update.digest not in digests}
        ledger.waiting = [update for update in ledger.waiting if update.digest not in digests]
        return tuple(effects)

    def _stood_still_until(self, now: float) -> Effects:
        """End the wait for disk space: move each deadline by the time that the disk was full."""
        ledger = self.ledger
        if ledger.short_since is None:
            return ()
        seconds, ledger.short_since, ledger.short_of = max(0.0, now - ledger.short_since), None, ""
        effects = self.invitations.stood_still(seconds)
        if self.round is not None:
            effects += self.round.stood_still(seconds)
        self._extend_evaluation(seconds)
        return effects

    # ------------------------------------------------------------ clients

    def _client_joined(self, event: ClientJoined, now: float) -> Effects:
        client_id = event.client_id
        membership = self.ledger.membership
        membership.joined(client_id, event.session, event.profile, event.software, now)
        if self.rules.secure is not None and not event.joins_sessions:
            agent = event.software or "an older one"
            why = f"its agent ({agent}) takes part in no secure sums: it needs this version, and certificates"
            membership.noted(client_id, FailureReason.SESSION_REFUSED, why, now)
            membership.declined(client_id)
            membership.declined_evaluation(client_id)
        effects: list[Effect] = [*self.invitations.joined(client_id, now)]
        effects += (r for round_id in event.working_on for r in self._release(client_id, round_id))
        if self.round is not None:
            effects += self.round.client_joined(client_id, now)
        effects += self._asked_again(client_id)
        if self._are_enough_back:
            effects.append(ResumeRun())
        return tuple(effects)

    @property
    def _are_enough_back(self) -> bool:
        """Return whether the run is paused only because of absent clients, and these are back."""
        ledger = self.ledger
        if ledger.state is not RunState.PAUSED or not ledger.resumes_itself or ledger.short_since is not None:
            return False
        accepted = {*ledger.carried, *(update.client_id for update in ledger.waiting)}
        return len(accepted.union(ledger.membership.available())) >= self.rules.policy.quorum_count

    def _client_disconnected(self, event: ClientDisconnected, now: float) -> Effects:
        client_id = event.client_id
        if self.ledger.membership.disconnected(client_id, event.session, now):
            self.invitations.disconnected(client_id, now)
            if self.round is not None:
                self.round.client_disconnected(client_id, now)
        return ()

    def _client_lost(self, event: ClientLost, now: float) -> Effects:
        client_id, reason = event.client_id, event.reason
        self._note_why_it_left(event, now)
        self.ledger.membership.lost(client_id, reason, now - event.silent_for)
        effects = self.invitations.ended(client_id, None, Fate.LOST, reason, "", now)
        if self.round is not None:
            effects += self.round.client_gave_up(client_id, Fate.LOST, reason, "", now)
        return (*effects, *self._evaluation_lost(client_id, reason, now))

    # ------------------------------------------------------------ from round to round

    def _run_started(self, event: RunStarted, now: float) -> Effects:
        assert self.ledger.state is RunState.QUEUED, self.ledger.state
        self.ledger.state, self.ledger.model_digest = RunState.RUNNING, event.model_digest
        return self._next_round_or_end()

    def _round_due(self, event: RoundDue, now: float) -> Effects:
        ledger = self.ledger
        if not ledger.is_round_due or ledger.state is not RunState.RUNNING:
            return ()
        ledger.is_round_due, ledger.retry_at = False, 0.0
        ledger.membership.wake(now)
        ledger.membership.begin_round(ledger.version)
        self.round = self._buffer(now) if self.rules.policy.is_asynchronous else self._round_with_cohort(now)
        ledger.next_round = RoundId(ledger.next_round + 1)
        return ()

    def _round_with_cohort(self, now: float) -> Round:
        ledger = self.ledger
        ledger.forget_old_rounds(most=max(3, self.rules.policy.max_staleness + 2))
        late, ledger.carried = ledger.carried, {}
        if self.rules.secure is not None:
            from atoll.server.rounds.secure_round import SecureRound

            return SecureRound(
                ledger.next_round, ledger.version, self.rules, ledger.membership, tuple(ledger.ranges), now
            )
        round_ = Round(ledger.next_round, ledger.version, self.rules, ledger.membership, late, now)
        if self.rules.privacy is not None and self.rules.privacy.adaptive is not None:
            round_.record.clip_norm = ledger.clip_norm or self.rules.privacy.clip_norm
        round_.noises = ledger.noises
        return round_

    def _buffer(self, now: float) -> Buffer:
        ledger, policy = self.ledger, self.rules.policy
        ledger.forget_old_rounds(most=3, oldest_base=Version(ledger.version - policy.max_staleness))
        first, ledger.waiting = ledger.waiting[: policy.num_wanted], ledger.waiting[policy.num_wanted :]
        return Buffer(ledger.next_round, ledger.version, self.rules, ledger.membership, self.invitations, first, now)

    def _cohort_drawn(self, event: CohortDrawn, now: float) -> Effects:
        round_ = self._open(event.round_id)
        return round_.cohort_drawn(event.clients, now) if round_ else ()

    def _sampler_failed(self, event: SamplerFailed, now: float) -> Effects:
        round_ = self._open(event.round_id)
        return round_.sampler_failed(event.detail, now) if round_ else ()

    def _aggregated(self, event: Aggregated, now: float) -> Effects:
        round_ = self._open(event.round_id)
        if round_ is None:
            return ()
        self.ledger.clip_norm = event.clip_norm or self.ledger.clip_norm
        return round_.aggregated(event, now)

    def _session_event(self, event: SessionEvent, now: float) -> Effects:
        """Pass an event of secure sums to their round, or their evaluation."""
        if event.purpose == "evaluation":
            return self._event_of_evaluation(event, now)
        round_ = self._open(event.round_id)
        if round_ is None or not round_.is_secure:
            return ()
        secure = cast("SecureRound", round_)
        if isinstance(event, SessionLeft) and not secure.is_news_of(event):
            return ()
        return secure.session_event(event, now)

    def _aggregation_failed(self, event: AggregationFailed, now: float) -> Effects:
        round_ = self._open(event.round_id)
        return round_.aggregation_failed(event, now) if round_ else ()

    def _after(self, effects: Effects, now: float) -> Effects:
        """Advance the open round after an event, and the run after the end of a round."""
        if self.round is not None:
            effects += self.round.look_for_clients(now)
        more: Effects = ()
        for effect in effects:
            if isinstance(effect, Commit):
                more += self._committed(effect, now)
            elif isinstance(effect, Abandon):
                more += self._abandoned(effect, now)
        return effects + more

    def _committed(self, commit: Commit, now: float) -> Effects:
        ledger, round_ = self.ledger, self._take_round()
        self._keep_noise(commit)
        ledger.version, ledger.model_digest, ledger.failures = commit.version, commit.model_digest, 0
        ledger.membership.approval_by, ledger.ranges = None, round_.record.ranges
        self._pace(round_, commit)
        if isinstance(round_, Round):
            effects = ledger.settle_committed(round_.record, round_.late)
        else:
            effects = ledger.settle_buffer_committed(round_.record)
        ledger.past[round_.record.round_id] = round_.record
        is_last = ledger.version >= self.rules.rounds
        released = self.invitations.release_after_commit(round_.record, now, is_last=is_last)
        return (*effects, *released, *self._evaluate(now), *self._next_round_or_end())

    def _keep_noise(self, commit: Commit) -> None:
        """Keep the identity of a version's noise as long as later versions take parts of it off again."""
        if (privacy := self.rules.privacy) is not None and privacy.earlier:
            row = NoiseRow(commit.round_id, self.ledger.model_digest, set_digest(commit.used))
            self.ledger.noises = (row, *self.ledger.noises)[: len(privacy.earlier)]

    def _pace(self, round_: OpenRound, commit: Commit) -> None:
        """Add the updates that are in the model to the pacer: a superseded update is in none."""
        if window := self.rules.pacer_window:
            used = [utility_of(update) for update in round_.held if update.digest in commit.used]
            self.ledger.membership.pacer.committed(used, window)

    def _abandoned(self, abandon: Abandon, now: float) -> Effects:
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
        if self._has_no_model:
            return (*effects, *self._end(RunState.FAILED, record.detail))
        return (*effects, *self._retry_or_give_up(record, now))

    def _retry_or_give_up(self, record: RoundRecord, now: float) -> Effects:
        """Repeat an abandoned round after a wait; after more than `retry` consecutive ones fail or pause the run."""
        policy, ledger = self.rules.policy, self.ledger
        assert record.abandon_reason is not None
        if record.waiting_since is not None and record.abandon_reason is AbandonReason.TOO_FEW_CLIENTS:
            return self._waited_in_vain(f"round {record.round_id} has waited for clients: {record.detail}")
        if record.abandon_reason is AbandonReason.AWAITS_ROOM:
            return self._waited_in_vain(record.detail)
        if record.abandon_reason not in COSTS_NO_RETRY:
            ledger.failures += 1
            record.retry, record.retry_max = ledger.failures, policy.retry
        misfits = [*ledger.membership.misfits()] if record.is_misfit else []
        is_hopeless = 0 < len(misfits) == ledger.membership.num_connected  # another attempt would end the same way
        if (is_hopeless or ledger.failures > policy.retry) and ledger.stop_reason is None:
            cause = cause_of_misfits(misfits) if is_hopeless else record.cause_of_end(ledger.failures)
            if policy.on_failure == "fail":
                return self._end(RunState.FAILED, cause)
            ledger.failures, ledger.pause_reason = 0, ledger.pause_reason or cause
        elif record.abandon_reason is not AbandonReason.PAUSE_REQUESTED and ledger.pause_reason is None:
            failures, seed = record.retry or 1, self.rules.seed
            wait = seconds_to_retry(policy, failures=failures, seed=seed, round_id=record.round_id)
            if wait:
                ledger.retry_at = record.retry_at = now + wait
        return self._next_round_or_end()

    def _waited_in_vain(self, cause: str) -> Effects:
        """Fail or pause the run after the longest wait that its rules allow."""
        ledger, wait = self.ledger, self.rules.wait
        assert wait is not None
        if ledger.stop_reason is None and wait.then == "fail":
            return self._end(RunState.FAILED, cause)
        ledger.failures, ledger.resumes_itself = 0, ledger.pause_reason is None
        ledger.pause_reason = ledger.pause_reason or cause
        return self._next_round_or_end()

    def _take_round(self) -> OpenRound:
        assert self.round is not None
        round_, self.round = self.round, None
        return round_

    def _next_round_or_end(self) -> Effects:
        ledger = self.ledger
        if ledger.stop_reason is not None:
            return self._end(RunState.STOPPED, ledger.stop_reason)
        if ledger.evaluation is not None or self._awaits_metric or self._has_too_many_unevaluated:
            return ()
        if ledger.early_stop:
            return self._end(RunState.FINISHED, ledger.early_stop)
        if ledger.version >= self.rules.rounds:
            return self._end_when_done()
        if ledger.pause_reason is not None:
            ledger.state, ledger.cause, ledger.pause_reason = RunState.PAUSED, ledger.pause_reason, None
            ledger.is_round_due, ledger.retry_at = False, 0.0
            return (PauseRun(ledger.cause),)
        if cause := self._why_budget_is_spent():
            return self._end(RunState.FINISHED, cause)
        ledger.is_round_due = True
        return (OpenNextRound(ledger.retry_at),)

    def _why_budget_is_spent(self) -> str:
        """Return why no further round keeps the budget: with it, the quorum would need a spent client; empty: one does.

        Members that are away count as long as they may be used: the round waits for them. So do updates that wait for a
        buffer: they are charged.
        """
        privacy, membership = self.rules.privacy, self.ledger.membership
        quorum = self.rules.policy.quorum_count
        if privacy is None:
            return ""
        apart, usable = membership.num_apart(self.ledger.version)  # no version follows in which the others are
        if usable + len(self.ledger.waiting) >= quorum or (apart < quorum and not membership.is_unseen_spent):
            return ""
        return privacy.cause_of_end(membership.most_spent, self.ledger.version)

    def _end_when_done(self) -> Effects:
        ledger = self.ledger
        if ledger.state is not RunState.RUNNING or ledger.version < self.rules.rounds:
            return ()
        if self.round is not None or ledger.evaluation is not None or ledger.unevaluated or ledger.computing:
            return ()
        return self._end(RunState.FINISHED, f"{count_of(self.rules.rounds, 'round is', 'rounds are')} committed")

    # ------------------------------------------------------------ the operator

    def _pause(self, event: PauseRequested, now: float) -> Effects:
        ledger, reason = self.ledger, event.reason
        is_ending = ledger.stop_reason is not None or (self.round is None and ledger.version >= self.rules.rounds)
        if ledger.state is not RunState.RUNNING or is_ending:
            return ()
        ledger.pause_reason = reason
        if self.round is not None:
            return () if self.round.has_begun else self.round.pause(reason, now)
        return self._next_round_or_end()

    def _resume(self, event: ResumeRequested, now: float) -> Effects:
        ledger = self.ledger
        if ledger.state is RunState.RUNNING:
            ledger.pause_reason = None  # cancels a pause that has not taken effect
        rounds = (event.rules or self.rules).rounds
        has_all = ledger.state is RunState.FINISHED and ledger.version >= rounds
        if ledger.state is RunState.RUNNING or has_all or not ledger.model_digest:
            return ()
        if event.rules is not None:
            self._forget_measures(event.rules)
            ledger.rules = event.rules
            self._follow(event.rules)
            if event.rules.privacy is not None:
                ledger.membership.follow_budget(event.rules.privacy)
        ledger.membership.wake()
        if ledger.short_since is not None:  # another wait for disk space begins
            ledger.short_since, ledger.short_look = now, min(now + NEWS_S, now + self._short_until - ledger.short_since)
        ledger.resumes_itself, ledger.lost = False, []
        if ledger.state in TERMINAL:
            ledger.failures, ledger.progress, ledger.early_stop = 0, None, ""  # the longest wait begins again
            ledger.membership.everyone_disconnected()  # the driver reports the connected clients again now
        ledger.state, ledger.cause = RunState.QUEUED if event.wait else RunState.RUNNING, ""
        return () if event.wait else (*ledger.computing, *self._next_round_or_end())

    def _stop(self, event: StopRequested, now: float) -> Effects:
        ledger, reason = self.ledger, event.reason
        if not ledger.is_open:
            return ()
        if self.round is None:
            return self._end(RunState.STOPPED, reason)
        effects = () if self.round.phase is Phase.AGGREGATING else self.round.stop(reason, now)
        if self.round.phase is Phase.AGGREGATING:
            ledger.stop_reason = reason  # the accepted updates become a version first
        return effects

    def _end(self, state: RunState, cause: str) -> Effects:
        ledger, is_private = self.ledger, self.rules.privacy is not None
        effects = [*self.invitations.release_all(ReleaseReason.RUN_ENDED, ledger.now)]
        effects += self._charged_in_vain(ledger.waiting)
        effects += ledger.settle_end(state, is_private=is_private)
        ledger.state, ledger.cause, ledger.stop_reason, ledger.pause_reason = state, cause, None, None
        ledger.resumes_itself, ledger.short_since = False, None
        ledger.evaluation, ledger.unevaluated, ledger.is_round_due, ledger.retry_at = None, [], False, 0.0
        ledger.membership.approval_by = None
        ledger.membership.everyone_disconnected(ledger.now)  # from now on the driver reports no connections to the run
        return (*effects, EndRun(state, cause))

    def _charged_in_vain(self, updates: Iterable[Update]) -> Effects:
        """Return the effect that audits the charges of accepted updates of a buffer that are in no round's charge."""
        privacy, membership, number = self.rules.privacy, self.ledger.membership, len([*updates])
        if privacy is None or not number:
            return ()
        charge = privacy.charged(number, membership.most_spent, membership.most_uses)
        return (AuditCharge("updates in no round", charge),)


HANDLERS: Mapping[type[Event], Callable[[RunMachine, Any, float], Effects]] = {
    UpdateReceived: RunMachine._update_received,
    UploadBegun: RunMachine._upload_begun,
    UpdateRefused: RunMachine._update_refused,
    ClientFailed: RunMachine._client_failed,
    ClientJoined: RunMachine._client_joined,
    ClientDisconnected: RunMachine._client_disconnected,
    ClientLost: RunMachine._client_lost,
    RunStarted: RunMachine._run_started,
    RoundDue: RunMachine._round_due,
    CohortDrawn: RunMachine._cohort_drawn,
    SamplerFailed: RunMachine._sampler_failed,
    **dict.fromkeys(get_args(SessionEvent), RunMachine._session_event),
    Aggregated: RunMachine._aggregated,
    AggregationFailed: RunMachine._aggregation_failed,
    ModelEvaluated: RunMachine._model_evaluated,
    ClientEvaluated: RunMachine._client_evaluated,
    MetricsComputed: RunMachine._metrics_computed,
    DiskShort: RunMachine._disk_short,
    DiskFree: RunMachine._disk_free,
    FilesLost: RunMachine._files_lost,
    StopRequested: RunMachine._stop,
    PauseRequested: RunMachine._pause,
    ResumeRequested: RunMachine._resume,
}
"""Handler of each event, with three exceptions: `receive` applies CoordinatorStarted and PublishedNamed before the
passed deadlines, and TimePassed through these deadlines alone. An answer that arrives too late, such as the cohort of
an ended round, changes nothing."""

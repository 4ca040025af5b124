"""The referee of a run, which judges the decision about each of its events by the policy."""

import math
from collections.abc import Sequence

from atoll.protocol.vocabulary import (
    AWAY,
    DECLINES,
    TROUBLES,
    AbandonReason,
    ClientId,
    Digest,
    FailureReason,
    Fate,
    LossReason,
    RoundId,
    RunState,
    Version,
)
from atoll.server.rounds import events as e
from atoll.server.rounds.client_evaluation import clients_to_ask
from atoll.server.rounds.retries import seconds_of_rest
from atoll.server.rounds.run_rules import RunRules
from tests.histories.referee.buffer_referee import BufferReferee
from tests.histories.referee.decisions import Decision, decision_of
from tests.histories.referee.measure_referee import MeasureReferee
from tests.histories.referee.round_referee import RoundReferee
from tests.histories.referee.run_facts import BufferFacts, RunFacts
from tests.histories.referee.verdicts import verdict_on

NO_FAILURES = (
    AbandonReason.STOP_REQUESTED,
    AbandonReason.PAUSE_REQUESTED,
    AbandonReason.AWAITS_APPROVAL,
    AbandonReason.AWAITS_CLIENTS,
    AbandonReason.AWAITS_ROOM,
    AbandonReason.FILES_LOST,
)
"""Reasons of abandoned rounds that use up no retry."""


class Referee:
    """The referee of one run, as the module describes."""

    def __init__(self, rules: RunRules) -> None:
        self.rules, self.policy = rules, rules.policy
        self.run = RunFacts()
        self.now = 0.0
        self.asked: dict[ClientId, bool] | None = None  # client -> has answered; None: no evaluation
        self.ask_by = 0.0
        self.unevaluated: set[int] = set()
        self.failures = 0
        self.short_since: float | None = None  # the disk has had no room since then
        self.is_round_due = False
        self._has_sums = False  # of the clients' evaluation
        self._no_evaluation: set[ClientId] = set()  # clients that have declined to evaluate
        self._required: list[Decision] = []
        self.measures = MeasureReferee(rules, self._decide)
        rounds = RoundReferee if rules.policy.mode == "sync" else BufferReferee
        self._rounds: RoundReferee | BufferReferee = rounds(rules, self.run, self._decide)

    def judge(self, at: float, event: e.Event, effects: Sequence[e.Effect]) -> str | None:
        """Compare the decisions about an event with those that the policy requires; return the difference, or None."""
        self.now, self._required = at, []
        if isinstance(event, e.CoordinatorStarted):
            self._restarted(event)
        for _ in range(
            4 + 2 * len(self._rounds.training()) + len(self.run.resting)
        ):  # a deadline may be followed by another
            if not self._let_time_pass():
                break
        if not isinstance(event, e.CoordinatorStarted | e.TimePassed):
            self._happened(event)
            self._end_round_if_over()
        decided, required = [d for d in map(decision_of, effects) if d], self._required
        if decided == required or sorted(decided, key=repr) == sorted(required, key=repr):
            return None
        missing = [d for d in required if d not in decided]
        surplus = [d for d in decided if d not in required]
        return f"decided {surplus or 'nothing'} where the policy requires {missing or 'nothing'}"

    def _decide(self, *decision: object) -> None:
        self._required.append(decision)

    def _restarted(self, event: e.CoordinatorStarted) -> None:
        down = max(0.0, self.now - event.down_since)
        self.run.all_left()
        self._time_runs_again(min(self.now, event.down_since))
        for version in sorted(self.unevaluated):
            self._decide("evaluate", version)
        if self.run.is_open:
            self.measures.begin_again()
        self._rounds.restarted(self.run.round, down)
        if self.asked is not None:
            self.ask_by += min(down, self.policy.outage_max)
        if self.is_round_due:
            self._decide("next round")

    def _let_time_pass(self) -> bool:
        """Let the first deadline pass, if it is over; return whether it is. None passes while the disk is full."""
        if self.short_since is not None:
            self._wait_for_room(self.short_since)
            return False
        if self.run.round is not None and self.now >= self._rounds.next_wake(self.run.round):
            self.run.wake(self.now)
            self._end_round_if_over()
            return True
        if isinstance(self._rounds, BufferReferee):
            return self._let_time_pass_for_buffers(self._rounds)
        if self.run.round is not None:
            is_over = self._rounds.let_time_pass(self.run.round, self.now)
            self._hand_over()
            return is_over
        if self.asked is None or self.now < self.ask_by:
            return False
        self._close_evaluation()
        return True

    def _wait_for_room(self, since: float) -> None:
        """Give up after the longest wait, unless the run is paused, about to be, or has all of its versions."""
        run, wait = self.run, self.rules.wait
        if wait is None or wait.most is None or self.now < since + wait.most:
            return
        if run.state is not RunState.RUNNING or run.resumes_itself:
            return
        if run.round is not None:
            self._rounds.abandon(run.round, AbandonReason.AWAITS_ROOM)
            self._hand_over()
        elif run.version < self.rules.rounds:
            self._waited_in_vain()

    def _let_time_pass_for_buffers(self, buffers: BufferReferee) -> bool:
        round_ = self.run.round
        invitation, buffer = buffers.next_due(), buffers.buffer_due(round_)
        ask_by = self.ask_by if self.asked is not None and round_ is None else math.inf
        if self.now < min(invitation, buffer, ask_by):
            return False
        if invitation < min(buffer, ask_by):
            buffers.let_invitations_end()
        elif round_ is None:
            self._close_evaluation()
        else:
            buffers.let_buffer_end(round_, self.now)
        self._end_round_if_over()
        return True

    def _end_round_if_over(self) -> None:
        if self.run.round is not None:
            self._rounds.let_it_end(self.run.round, self.now)
            self._hand_over()

    # ------------------------------------------------------------ events

    def _happened(self, event: e.Event) -> None:
        run = self.run
        match event:
            case e.ClientJoined():
                self._joined(event)
            case e.ClientDisconnected(client_id, session):
                if run.connected.get(client_id) == session:
                    run.left(client_id)
            case e.ClientLost(client_id, reason):  # no client of a history leaves for a reason of its own
                run.left(client_id)
                run.lost.add(client_id)
                run.silent = {*run.silent - {client_id}, *([client_id] if reason == LossReason.LEASE_EXPIRED else ())}
                self._rounds.gave_up(client_id, None, Fate.LOST)
                self._evaluation_over_of(client_id)
            case e.ClientFailed(client_id, round_id):
                self._trouble(event)
                round_ = run.invitation(client_id, round_id)
                if round_ is not None and round_.fates[client_id] is Fate.WAITING:
                    round_.gone_for_now -= {client_id}
                    round_.gone_for_now |= {client_id} if event.reason in AWAY else set()
                self._rounds.gave_up(client_id, round_id, Fate.FAILED)
            case e.UpdateRefused(client_id, round_id):
                self._rounds.gave_up(client_id, round_id, Fate.REFUSED)
            case e.UploadBegun(client_id, round_id):
                self._rounds.upload_begun(client_id, round_id, self.now)
            case e.UpdateReceived(update):
                self._update(update)
            case _:
                self._progressed(event)

    def _trouble(self, event: e.ClientFailed) -> None:
        """Leave a client alone that declines, or that fails while its work is awaited."""
        run, client_id, policy = self.run, event.client_id, self.policy
        if event.reason in DECLINES and client_id in run.connected:
            run.declined[client_id] = event.waits or event.reason is FailureReason.AWAITS_APPROVAL
        round_ = run.invitation(client_id, event.round_id)
        if event.reason in TROUBLES and round_ is not None and round_.fates[client_id] is Fate.WAITING:
            run.num_failures[client_id] += 1
            number, seed = run.num_failures[client_id], self.rules.seed
            rest = seconds_of_rest(policy, failures=number, seed=seed, client_id=client_id)
            if rest:
                run.resting[client_id] = self.now + rest

    def _progressed(self, event: e.Event) -> None:
        match event:
            case e.RunStarted():
                self.run.state, self.run.has_begun = RunState.RUNNING, True
                self._go_on()
            case e.RoundDue() if self.is_round_due and self.run.state is RunState.RUNNING:
                self._open_round()
            case e.CohortDrawn(round_id, clients) if round_ := self.run.open(round_id):
                self._rounds.drawn(round_, clients, self.now)
            case e.SamplerFailed(round_id):
                self._failed(round_id, AbandonReason.SAMPLER_FAILED)
            case e.Aggregated(round_id) if self.run.rounds[round_id].abandon_reason is None:  # else it comes too late
                self._commit()
            case e.AggregationFailed(round_id):
                self._failed(round_id, AbandonReason.AGGREGATION_FAILED)
            case _:
                self._ordered(event)
                self._evaluated(event)

    def _time_runs_again(self, now: float) -> None:
        if self.short_since is None:
            return
        seconds, self.short_since = max(0.0, now - self.short_since), None
        self.ask_by += seconds
        self._rounds.stood_still(self.run.round, seconds)

    def _ordered(self, event: e.Event) -> None:
        match event:
            case e.DiskShort() if self.run.is_open and self.short_since is None:
                self.short_since = self.now
            case e.DiskFree():
                self._has_room_again()
            case e.FilesLost(updates):
                self._lose({*updates})
            case e.StopRequested():
                self._stop()
            case e.PauseRequested():
                self._pause()
            case e.ResumeRequested(wait):
                self._resume(wait=wait)

    def _has_room_again(self) -> None:
        run, was_short = self.run, self.short_since is not None
        self._time_runs_again(self.now)
        if was_short and run.resumes_itself and run.state is RunState.PAUSED:
            self._decide("resume")
        elif was_short and run.resumes_itself and run.state is RunState.RUNNING:
            run.is_pause_wanted = run.resumes_itself = False

    def _lose(self, digests: set[Digest]) -> None:
        self.run.lose(digests)
        if self.run.round is not None:
            self._rounds.lost(self.run.round, digests)
            self._hand_over()

    def _joined(self, event: e.ClientJoined) -> None:
        run, client_id = self.run, event.client_id
        run.connected[client_id] = event.session
        run.declined.pop(client_id, None)
        self._no_evaluation.discard(client_id)
        run.sampler_view.profiles[client_id] = event.profile
        run.lost.discard(client_id)
        run.settled_for = 0 if len(run.connected) > run.settled_for else run.settled_for
        self._rounds.came_back(client_id, event.working_on, self.now)
        if self.asked is not None and self.asked.get(client_id) is False:
            self._decide("ask", client_id, run.version, round(self.ask_by, 6))
        accepted = {*run.carried, *(update.client_id for update in run.waiting)}
        are_enough = len(accepted.union(run.available)) >= self.policy.quorum_count
        if run.state is RunState.PAUSED and run.resumes_itself and are_enough and self.short_since is None:
            self._decide("resume")

    def _update(self, update: e.Update) -> None:
        verdict, reason = verdict_on(update, self.run, self.rules)
        self._rounds.note(update, verdict, reason, self.now)
        name = (update.client_id, update.round_id, update.digest)
        if reason is None:
            self._decide("accept", *name)
        else:
            self._decide("reject", *name, reason)

    def _failed(self, round_id: RoundId, reason: AbandonReason) -> None:
        round_ = self.run.open(round_id)
        is_fold = reason is AbandonReason.AGGREGATION_FAILED
        is_asked = round_ is not None and (round_.is_aggregating if is_fold else round_.is_awaiting_draw)
        if round_ is not None and is_asked:
            self._rounds.abandon(round_, reason)
            self._hand_over()

    # ------------------------------------------------------------ from round to round

    def _open_round(self) -> None:
        run = self.run
        self.is_round_due = False
        run.wake(self.now)
        round_id = RoundId(len(run.rounds) + 1)
        run.round = run.rounds[round_id] = self._rounds.opened(round_id, self.now)
        if isinstance(self._rounds, RoundReferee):
            self._rounds.draw_if_enough(run.round, self.now)

    def _commit(self) -> None:
        run = self.run
        round_, run.round = run.round, None
        assert round_ is not None
        round_.is_committed = True
        run.version += 1
        self.failures, run.approval_by = 0, None
        used = sorted(round_.contributions(), key=lambda u: (u.client_id, u.round_id))
        run.sampler_view.committed(used)
        for update in used:
            run.accepted[update.client_id, update.round_id].is_used = True
        for client_id, update in round_.late.items():
            if client_id in round_.reported:
                run.leave(update)
        self._decide("commit", round_.round_id, run.version, tuple(u.digest for u in used))
        self._rounds.committed(is_last=run.version >= self.rules.rounds)
        self._begin_evaluation()
        self._go_on()

    def _hand_over(self) -> None:
        """Settle the updates of an abandoned round, and continue or end the run."""
        run = self.run
        round_ = run.round
        if round_ is None or round_.abandon_reason is None:
            return
        run.round = None
        is_stop = round_.abandon_reason is AbandonReason.STOP_REQUESTED
        is_failed = round_.abandon_reason is AbandonReason.AGGREGATION_FAILED
        if isinstance(round_, BufferFacts):
            self._hand_over_buffer(round_, is_lost=is_stop or is_failed)
        for update in (*round_.late.values(), *round_.reported.values()):
            if self.policy.late == "next_round" and not (is_stop or is_failed):
                run.carry(update)
            else:
                run.leave(update)
        in_vain = round_.waiting_since is not None and round_.abandon_reason is AbandonReason.TOO_FEW_CLIENTS
        in_vain |= round_.abandon_reason is AbandonReason.AWAITS_ROOM
        self.failures += round_.abandon_reason not in NO_FAILURES and not in_vain
        has_failed = self.failures > self.policy.retry and not run.is_stop_wanted
        if is_stop:
            self._end(RunState.STOPPED)
        elif (has_failed and self.policy.on_failure == "fail") or (in_vain and self._fails_after_a_wait):
            self._end(RunState.FAILED)
        else:
            if in_vain:
                self.failures, run.resumes_itself = 0, not run.is_pause_wanted
            if has_failed or in_vain:
                self.failures, run.is_pause_wanted = 0, True
            self._go_on()

    def _waited_in_vain(self) -> None:
        if self._fails_after_a_wait:
            self._end(RunState.FAILED)
            return
        self.failures, self.run.resumes_itself, self.run.is_pause_wanted = 0, not self.run.is_pause_wanted, True
        self._go_on()

    @property
    def _fails_after_a_wait(self) -> bool:
        wait = self.rules.wait
        return wait is not None and wait.then == "fail" and not self.run.is_stop_wanted

    def _hand_over_buffer(self, round_: BufferFacts, *, is_lost: bool) -> None:
        if is_lost:
            for update in round_.filled:
                self.run.leave(update)
        else:
            self.run.waiting = [*round_.filled, *self.run.waiting]

    def _go_on(self) -> None:
        if self.run.is_stop_wanted:
            self._end(RunState.STOPPED)
        elif self.asked is not None or self.measures.awaits_value(self.unevaluated):
            return
        elif self.measures.has_stopped:
            self._end(RunState.FINISHED)
        elif self.run.version >= self.rules.rounds:
            self._end_when_done()
        elif self.run.is_pause_wanted:
            self.run.state, self.run.is_pause_wanted, self.is_round_due = RunState.PAUSED, False, False
            self._decide("pause")
        else:
            self.is_round_due = True
            self._decide("next round")

    def _end_when_done(self) -> None:
        run = self.run
        is_open = run.round is not None or self.asked is not None or self.unevaluated or self.measures.computing
        if run.state is RunState.RUNNING and run.version >= self.rules.rounds and not is_open:
            self._end(RunState.FINISHED)

    def _stop(self) -> None:
        run = self.run
        if not run.is_open:
            return
        if run.round is None:
            self._end(RunState.STOPPED)
        elif run.round.is_aggregating:
            run.is_stop_wanted = True
        else:
            self._rounds.stop(run.round)
            self._hand_over()

    def _pause(self) -> None:
        """Let no round begin any more; a round that has invited clients runs to its end."""
        run = self.run
        nothing_follows = run.is_stop_wanted or (run.round is None and run.version >= self.rules.rounds)
        if run.state is not RunState.RUNNING or nothing_follows:
            return
        run.is_pause_wanted = True
        if run.round is None:
            self._go_on()
        elif run.round.is_untouched:
            self._rounds.abandon(run.round, AbandonReason.PAUSE_REQUESTED)
            self._hand_over()

    def _resume(self, *, wait: bool) -> None:
        run = self.run
        if run.state is RunState.RUNNING:
            run.is_pause_wanted = False
        elif run.has_begun and run.state is not RunState.FINISHED:
            run.wake()
            run.resumes_itself = False
            self.short_since = None if self.short_since is None else self.now
            if not run.is_open:
                self.failures = 0
                self.measures.reopened()
                run.all_left()
            run.state = RunState.QUEUED if wait else RunState.RUNNING
            if not wait:
                self.measures.begin_again()
                self._go_on()

    def _end(self, state: RunState) -> None:
        run = self.run
        for update in (*run.carried.values(), *run.waiting):
            run.leave(update)
        run.carried, run.waiting = {}, []
        self._rounds.run_ended()
        run.all_left()
        run.approval_by, run.resumes_itself = None, False
        run.state, run.is_stop_wanted, run.is_pause_wanted, self.is_round_due = state, False, False, False
        self.asked, self.unevaluated, self.short_since = None, set(), None
        self._decide("end", state)

    # ------------------------------------------------------------ evaluation

    def _begin_evaluation(self) -> None:
        rules, version = self.rules, self.run.version
        is_last = version >= rules.rounds
        if rules.evaluate_server_every and (is_last or version % rules.evaluate_server_every == 0):
            self.unevaluated.add(version)
            self._decide("evaluate", version)
        if rules.evaluate_clients_every and (is_last or version % rules.evaluate_clients_every == 0):
            most, busy = rules.evaluate_clients_max, self._rounds.training()
            connected = [c for c in self.run.connected if c not in busy and c not in self._no_evaluation]
            asked = clients_to_ask(connected, most=most, seed=rules.seed, version=Version(version))
            self.ask_by = self.now + rules.evaluation_deadline
            self.asked = dict.fromkeys(asked, False) or None
            self._has_sums = False
            for client_id in asked:
                self._decide("ask", client_id, version, round(self.ask_by, 6))

    def _evaluated(self, event: e.Event) -> None:
        match event:
            case e.ModelEvaluated(version, statistics) if version in self.unevaluated:
                self.unevaluated.remove(version)
                self._measured(version, "server", has_sums=bool(statistics))
            case e.MetricsComputed():
                if self.measures.computed(event, is_running=self.run.state is RunState.RUNNING):
                    self._go_on_if_waiting()
            case e.ClientEvaluated(client_id, version, statistics, reason=reason):
                if reason in DECLINES:
                    self._no_evaluation.add(client_id)
                if version == self.run.version:
                    is_asked = self.asked is not None and self.asked.get(client_id) is False  # its first answer counts
                    self._has_sums |= is_asked and bool(statistics)
                    self._evaluation_over_of(client_id)

    def _evaluation_over_of(self, client_id: ClientId) -> None:
        """End the wait for a client's answer, and close the evaluation if it was the last."""
        if self.asked is not None and client_id in self.asked:
            self.asked[client_id] = True
            if all(self.asked.values()):
                self._close_evaluation()

    def _close_evaluation(self) -> None:
        assert self.asked is not None
        self._decide("evaluated", self.run.version, tuple(sorted(self.asked)))
        self.asked = None
        self._measured(self.run.version, "clients", has_sums=self._has_sums)

    def _measured(self, version: int, source: str, *, has_sums: bool) -> None:
        """Compute the values that decide, or pause a run that could not measure them even once."""
        if self.measures.measured(version, source, has_sums=has_sums):
            self._pause()
        self._go_on_if_waiting()

    def _go_on_if_waiting(self) -> None:
        """Open the next round or end the run, if it has only waited for an evaluation."""
        if self.run.state is RunState.RUNNING and self.run.round is None and not self.is_round_due:
            self._go_on()

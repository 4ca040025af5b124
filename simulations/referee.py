"""Judges a run by its policy alone: a second, slower reading of DESIGN section 4, independent of the machines.

The referee reads the events that are on the coordinator's disk, works out from the policy what had to be decided about
each, at once and at that instant, and compares. It shares with the machines their vocabulary and nothing else.
"""

from collections.abc import Iterable

from atoll.protocol.vocabulary import AbandonReason, ClientId, CloseReason, Fate, ReleaseReason, RoundId, RunState
from atoll.server import events as e
from atoll.server.evaluation import clients_to_ask
from atoll.server.run import RunRules
from atoll.simulations.facts import Accepted, Books, RoundFacts
from atoll.simulations.history import Step
from atoll.simulations.verdicts import Verdict, verdict_on

Decision = tuple[object, ...]


class Referee:
    """See the module docstring."""

    def __init__(self, rules: RunRules) -> None:
        self.rules, self.policy = rules, rules.policy
        self.books = Books()
        self.now = 0.0
        self.ends: list[RunState] = []
        self.asked: dict[ClientId, bool] | None = None  # whether each has answered; None: no evaluation
        self.ask_by = 0.0
        self.unevaluated: set[int] = set()
        self.failures = 0
        self.is_round_due = False
        self._due: list[Decision] = []

    def judge(self, step: Step) -> str | None:
        """What is wrong with what was decided; None when it is exactly what the policy wants."""
        self.now, self._due = step.at, []
        if isinstance(step.event, e.CoordinatorStarted):
            self._restarted(step.event)
        self._let_time_pass()
        if not isinstance(step.event, e.CoordinatorStarted | e.TimePassed):
            self._happened(step.event)
            self._let_round_end()
        decided = sorted((d for d in map(_decision, step.effects) if d), key=repr)
        due = sorted(self._due, key=repr)
        if decided == due:
            return None
        missing = [d for d in due if d not in decided]
        surplus = [d for d in decided if d not in due]
        return f"decided {surplus or 'nothing'} where the policy wants {missing or 'nothing'}"

    def _decide(self, *what: object) -> None:
        self._due.append(what)

    # ------------------------------------------------------------ time

    def _restarted(self, event: e.CoordinatorStarted) -> None:
        books, down = self.books, max(0.0, self.now - event.down_since)
        books.connected.clear()
        for version in sorted(self.unevaluated):
            self._decide("evaluate", version)
        if (round_ := books.round) is not None:
            more = min(down, self.policy.outage_max - round_.extended)
            round_.extended += more
            round_.select_by += more
            round_.deadline += more
            round_.grace_by += more
            round_.linger_by = None if round_.linger_by is None else round_.linger_by + more
            round_.is_drawing = False
            if round_.is_aggregating:
                self._aggregate(round_)
        if self.asked is not None:
            self.ask_by += min(down, self.policy.outage_max)
        if self.is_round_due:
            self._decide("next round")

    def _let_time_pass(self) -> None:
        for _ in range(4):  # a deadline may be followed by another that is over as well
            round_ = self.books.round
            if round_ is not None and round_.is_selecting:
                self._selecting_timeout(round_)
            elif round_ is not None and round_.is_collecting:
                self._collecting_timeout(round_)
            elif round_ is None and self.asked is not None and self.now >= self.ask_by:
                self._close_evaluation()

    def _selecting_timeout(self, round_: RoundFacts) -> None:
        if round_.is_drawing or self.now < round_.select_by:
            return
        if self.books.connected and self._within_reach(self.books.connected) >= self.policy.quorum_count:
            self._draw(round_)
        else:
            self._abandon(round_, AbandonReason.TOO_FEW_CLIENTS)

    def _collecting_timeout(self, round_: RoundFacts) -> None:
        if round_.linger_by is not None and self.now >= round_.linger_by:
            if round_.linger_by < round_.deadline or round_.is_in_grace:
                self._close(round_, CloseReason.LINGER_OVER)
                return
        if round_.is_in_grace:
            if self.now >= round_.grace_by:
                self._close_or_abandon(round_, CloseReason.GRACE_OVER, AbandonReason.BELOW_QUORUM)
        elif self.now >= round_.deadline:
            uploading = any(round_.began_in_time(c) for c in round_.with_fate(Fate.WAITING))
            if uploading and self.policy.grace > 0:
                round_.is_in_grace, round_.grace_by = True, round_.deadline + self.policy.grace
                self._let_round_end()
            else:
                self._close_or_abandon(round_, CloseReason.DEADLINE, AbandonReason.BELOW_QUORUM)

    # ------------------------------------------------------------ events

    def _happened(self, event: e.Event) -> None:
        books = self.books
        match event:
            case e.ClientJoined():
                self._joined(event)
            case e.ClientDisconnected(client_id, session):
                if books.connected.get(client_id) == session:
                    del books.connected[client_id]
            case e.ClientLost(client_id):
                books.connected.pop(client_id, None)
                books.lost.add(client_id)
                self._gave_up(client_id, None, Fate.LOST)
                self._no_evaluation_of(client_id)
            case e.ClientFailed(client_id, round_id):
                self._gave_up(client_id, round_id, Fate.FAILED)
            case e.UpdateRefused(client_id, round_id):
                self._gave_up(client_id, round_id, Fate.REFUSED)
            case e.UploadBegun(client_id, round_id):
                if (round_ := books.open(round_id)) and round_.may_report(client_id):
                    round_.begun.setdefault(client_id, self.now)
            case e.UpdateReceived(update):
                self._update(update)
            case _:
                self._progressed(event)

    def _progressed(self, event: e.Event) -> None:
        books = self.books
        match event:
            case e.RunStarted() | e.ResumeRequested():
                if books.state is not RunState.RUNNING:
                    books.state, self.failures = RunState.RUNNING, 0
                    self._go_on()
            case e.RoundDue():
                self._open_round()
            case e.CohortDrawn(round_id, clients):
                if (round_ := books.open(round_id)) and round_.is_drawing:
                    self._drawn(round_, clients)
            case e.SamplerFailed(round_id):
                if (round_ := books.open(round_id)) and round_.is_drawing:
                    self._abandon(round_, AbandonReason.SAMPLER_FAILED)
            case e.Aggregated():
                self._commit()
            case e.AggregationFailed():
                assert books.round is not None
                self._abandon(books.round, AbandonReason.AGGREGATION_FAILED)
            case e.ModelEvaluated(version):
                if version in self.unevaluated:
                    self.unevaluated.remove(version)
                    self._end_when_done()
            case e.ClientEvaluated(client_id, version):
                if version == books.version:
                    self._no_evaluation_of(client_id)
            case e.StopRequested():
                self._stop()

    def _joined(self, event: e.ClientJoined) -> None:
        books, client_id = self.books, event.client_id
        books.connected[client_id] = event.session
        books.lost.discard(client_id)
        for round_id in event.working_on:
            self._tell_whether_wanted(client_id, round_id)
        if (round_ := books.round) is not None:
            if round_.is_collecting and round_.fates.get(client_id) in (Fate.WAITING, Fate.LOST):
                round_.fates[client_id] = Fate.WAITING
                self._invite(round_, client_id)
            self._draw_if_enough(round_)
        if self.asked is not None and self.asked.get(client_id) is False:
            self._decide("ask", client_id, books.version, round(self.ask_by, 6))

    def _tell_whether_wanted(self, client_id: ClientId, round_id: RoundId) -> None:
        books = self.books
        round_ = books.rounds.get(round_id)
        is_invited = round_ is not None and client_id in round_.fates and not round_.is_forgotten
        is_accepted = is_invited and (client_id, round_id) in books.accepted
        if is_accepted or (round_ and is_invited and round_.is_collecting):
            return
        may_submit = is_invited and self.policy.late == "next_round" and books.state is RunState.RUNNING
        self._decide("release", client_id, round_id, may_submit)

    def _gave_up(self, client_id: ClientId, round_id: RoundId | None, fate: Fate) -> None:
        round_ = self.books.round
        if round_ is None or not round_.is_collecting or round_id not in (None, round_.round_id):
            return
        if round_.fates.get(client_id) is Fate.WAITING:
            round_.fates[client_id] = fate

    def _update(self, update: e.Update) -> None:
        books = self.books
        verdict, reason = verdict_on(update, books, self.rules)
        client_id, round_id = update.client_id, update.round_id
        if verdict in (Verdict.REFUSED, Verdict.LATE):
            books.rounds[round_id].fates[client_id] = Fate.REFUSED if verdict is Verdict.REFUSED else Fate.LATE
        if reason is not None:
            self._decide("reject", client_id, round_id, update.digest, reason)
            return
        if verdict is Verdict.AGAIN:
            self._decide("accept", client_id, round_id, update.digest)
            return
        is_late = verdict is Verdict.CARRIED
        self._decide("accept", client_id, round_id, update.digest)
        if not is_late:
            books.measured(update, self.now - books.rounds[round_id].begun.get(client_id, self.now))
        books.accepted[client_id, round_id] = Accepted(update, is_late)
        books.rounds[round_id].fates[client_id] = Fate.CARRIED if is_late else Fate.REPORTED
        if is_late:
            books.carry(update)
        else:
            books.rounds[round_id].reported[client_id] = update

    # ------------------------------------------------------------ a round

    def _open_round(self) -> None:
        books = self.books
        if not self.is_round_due or books.state is not RunState.RUNNING:
            return
        self.is_round_due = False
        books.forget_old_rounds(most=max(3, self.policy.max_staleness + 2))
        round_id = RoundId(len(books.rounds) + 1)
        books.round = RoundFacts(round_id, books.version, self.now + self.policy.selection_timeout)
        books.rounds[round_id] = books.round
        books.round.late, books.carried = books.carried, {}
        self._draw_if_enough(books.round)

    def _draw_if_enough(self, round_: RoundFacts) -> None:
        if (
            round_.is_selecting
            and not round_.is_drawing
            and len(self.books.connected) >= self.policy.num_needed_to_draw
        ):
            self._draw(round_)

    def _draw(self, round_: RoundFacts) -> None:
        round_.is_drawing = True
        candidates = tuple(sorted(self.books.connected))
        self._decide("draw", round_.round_id, min(self.policy.num_invited, len(candidates)), candidates)

    def _drawn(self, round_: RoundFacts, clients: tuple[ClientId, ...]) -> None:
        books, policy = self.books, self.policy
        round_.is_drawing, round_.is_selecting = False, False
        round_.fates = {c: Fate.LOST if c in books.lost else Fate.WAITING for c in clients}
        seconds = policy.deadline
        if seconds == "adaptive":
            seconds = books.adaptive_seconds(clients, policy)
        round_.deadline = self.now + seconds
        for client_id in round_.with_fate(Fate.WAITING):
            self._invite(round_, client_id)

    def _invite(self, round_: RoundFacts, client_id: ClientId) -> None:
        self._decide("invite", client_id, round_.round_id, round_.base, round(round_.deadline, 6))

    def _within_reach(self, more: Iterable[ClientId] = ()) -> int:
        round_ = self.books.round
        assert round_ is not None
        return len({*round_.reported, *round_.late, *more})

    def _let_round_end(self) -> None:
        """Promptly: as soon as nothing more can change for the better, or nothing more is wanted."""
        round_, policy = self.books.round, self.policy
        if round_ is None or not round_.is_collecting:
            return
        if len(round_.reported) >= policy.cohort_size:
            self._close(round_, CloseReason.ENOUGH)
        elif not round_.awaited:
            if round_.with_fate(Fate.WAITING):
                self._close_or_abandon(round_, CloseReason.DEADLINE, AbandonReason.BELOW_QUORUM)
            else:
                self._close_or_abandon(round_, CloseReason.ALL_ANSWERED, AbandonReason.QUORUM_OUT_OF_REACH)
        elif self._within_reach(round_.awaited) < policy.quorum_count:
            self._abandon(round_, AbandonReason.QUORUM_OUT_OF_REACH)
        elif policy.linger is not None and round_.linger_by is None and len(round_.reported) >= policy.quorum_count:
            round_.linger_by = self.now + policy.linger
            if policy.linger == 0:
                self._close(round_, CloseReason.LINGER_OVER)

    def _close_or_abandon(self, round_: RoundFacts, close: CloseReason, abandon: AbandonReason) -> None:
        if self._within_reach() >= self.policy.quorum_count:
            self._close(round_, close)
        else:
            self._abandon(round_, abandon)

    def _release(self, round_: RoundFacts, fate: Fate, reason: ReleaseReason) -> None:
        may_submit = self.policy.late == "next_round" and reason is not ReleaseReason.RUN_ENDED
        for client_id in round_.with_fate(Fate.WAITING):
            round_.fates[client_id] = fate
            self._decide("release", client_id, round_.round_id, may_submit)

    def _close(self, round_: RoundFacts, reason: CloseReason) -> None:
        is_early = reason in (CloseReason.ENOUGH, CloseReason.LINGER_OVER)
        self._release(round_, Fate.RELEASED if is_early else Fate.STRAGGLER, ReleaseReason.ROUND_CLOSED)
        round_.close_reason = reason
        self._aggregate(round_)

    def _aggregate(self, round_: RoundFacts) -> None:
        policy, weights = self.policy, []
        for update in round_.contributions():
            staleness = round_.base - update.base_version
            is_own = update.round_id == round_.round_id
            assert is_own or 0 <= staleness <= policy.max_staleness, f"{update} is {staleness} versions old"
            scale = 1.0 if is_own else (1 + staleness) ** -policy.staleness_exponent
            scale *= update.work if policy.partial_work == "scaled" else 1.0
            weights.append((update.client_id, update.digest, update.num_examples, round(scale, 9)))
        assert len({client_id for client_id, *_ in weights}) == len(weights) >= policy.quorum_count, "below quorum"
        self._decide("aggregate", round_.round_id, round_.base, tuple(sorted(weights)))

    def _commit(self) -> None:
        books = self.books
        round_, books.round = books.round, None
        assert round_ is not None
        assert round_.is_aggregating, "aggregated what was not closed"
        round_.is_committed = True
        books.version += 1
        self.failures = 0
        used = sorted(round_.contributions(), key=lambda u: u.client_id)
        for update in used:
            books.accepted[update.client_id, update.round_id].used_in.append(round_.round_id)
        for update in round_.late.values():
            if update.client_id in round_.reported:
                books.leave(update)
        self._decide("commit", round_.round_id, books.version, tuple(u.digest for u in used))
        self._begin_evaluation()
        self._go_on()

    def _abandon(self, round_: RoundFacts, reason: AbandonReason) -> None:
        books = self.books
        is_stop = reason is AbandonReason.STOP_REQUESTED
        self._release(round_, Fate.STRAGGLER, ReleaseReason.RUN_ENDED if is_stop else ReleaseReason.ROUND_ABANDONED)
        round_.abandon_reason, books.round = reason, None
        self._decide("abandon", round_.round_id, reason)
        may_carry = self.policy.late == "next_round" and not is_stop
        for update in (*round_.late.values(), *round_.reported.values()):
            books.carry(update) if may_carry else books.leave(update)
        if is_stop:
            self._end(RunState.STOPPED)
            return
        self.failures += 1
        if self.failures > self.policy.retry and not books.is_stop_wanted:
            self._end(RunState.FAILED)
        else:
            self._go_on()

    # ------------------------------------------------------------ the run

    def _go_on(self) -> None:
        if self.books.is_stop_wanted:
            self._end(RunState.STOPPED)
        elif self.asked is None and self.books.version >= self.rules.rounds:
            self._end_when_done()
        elif self.asked is None:
            self.is_round_due = True
            self._decide("next round")

    def _end_when_done(self) -> None:
        books = self.books
        is_open = books.round is not None or self.asked is not None or self.unevaluated
        if books.state is RunState.RUNNING and books.version >= self.rules.rounds and not is_open:
            self._end(RunState.FINISHED)

    def _stop(self) -> None:
        books = self.books
        if books.state is not RunState.RUNNING:
            return
        if books.round is None:
            self._end(RunState.STOPPED)
        elif books.round.is_aggregating:
            books.is_stop_wanted = True
        else:
            self._abandon(books.round, AbandonReason.STOP_REQUESTED)

    def _end(self, state: RunState) -> None:
        books = self.books
        for update in list(books.carried.values()):
            books.leave(update)
        books.carried.clear()
        books.connected.clear()
        books.state, books.is_stop_wanted, self.is_round_due = state, False, False
        self.asked, self.unevaluated = None, set()
        self.ends.append(state)
        self._decide("end", state)

    # ------------------------------------------------------------ evaluation

    def _begin_evaluation(self) -> None:
        rules, version = self.rules, self.books.version
        is_last = version >= rules.rounds
        if rules.evaluate_server_every and (is_last or version % rules.evaluate_server_every == 0):
            self.unevaluated.add(version)
            self._decide("evaluate", version)
        if rules.evaluate_clients_every and (is_last or version % rules.evaluate_clients_every == 0):
            connected = self.books.connected
            asked = clients_to_ask(connected, most=rules.evaluate_clients_max, seed=rules.seed, version=version)
            self.ask_by = self.now + rules.evaluation_deadline
            self.asked = dict.fromkeys(asked, False) or None
            for client_id in asked:
                self._decide("ask", client_id, version, round(self.ask_by, 6))

    def _no_evaluation_of(self, client_id: ClientId) -> None:
        if self.asked is not None and client_id in self.asked:
            self.asked[client_id] = True
            if all(self.asked.values()):
                self._close_evaluation()

    def _close_evaluation(self) -> None:
        assert self.asked is not None
        self._decide("evaluated", self.books.version, tuple(sorted(self.asked)))
        self.asked = None
        self._go_on()


def _decision(effect: e.Effect) -> Decision | None:
    """An effect as the referee would write it."""
    match effect:
        case e.Invite(client_id, round_id, base, deadline):
            return ("invite", client_id, round_id, base, round(deadline, 6))
        case e.Release(client_id, round_id, _, submit):
            return ("release", client_id, round_id, submit)
        case e.Accept(client_id, round_id, digest):
            return ("accept", client_id, round_id, digest)
        case e.Reject(client_id, round_id, digest, reason):
            return ("reject", client_id, round_id, digest, reason)
        case e.DrawCohort(round_id, count, candidates):
            return ("draw", round_id, count, tuple(c.client_id for c in candidates))
        case e.Aggregate(round_id, base, contributions):
            weights = tuple((c.client_id, c.digest, c.num_examples, round(c.scale, 9)) for c in contributions)
            return ("aggregate", round_id, base, weights)
        case e.Commit(round_id, version, _, used):
            return ("commit", round_id, version, used)
        case e.Abandon(round_id, reason):
            return ("abandon", round_id, reason)
        case _:
            return _progress(effect)


def _progress(effect: e.Effect) -> Decision | None:
    match effect:
        case e.EvaluateModel(version):
            return ("evaluate", version)
        case e.AskEvaluation(client_id, version, deadline):
            return ("ask", client_id, version, round(deadline, 6))
        case e.CloseEvaluation(version, answers, failures):
            return ("evaluated", version, tuple(sorted((*answers, *failures))))
        case e.OpenNextRound():
            return ("next round",)
        case e.EndRun(state):
            return ("end", state)
        case _:
            return None  # an amended record is judged by what lies on disk at the end

"""The referee of a synchronous round: its invitations, its deadlines, and its end, by the policy alone."""

import math
from collections.abc import Callable, Collection, Iterable

from atoll.protocol.vocabulary import AbandonReason, ClientId, CloseReason, Digest, Fate, RejectReason, RoundId
from atoll.server.rounds import events as e
from atoll.server.rounds.policy import FIRST_WAIT_S
from atoll.server.rounds.run_rules import RunRules
from tests.histories.referee.run_facts import RoundFacts, RunFacts
from tests.histories.referee.verdicts import Verdict, discount_of


class RoundReferee:
    """The referee of the rounds, which works on the facts of the run; the run's referee goes on after its rounds."""

    def __init__(self, rules: RunRules, run: RunFacts, decide: Callable[..., None]) -> None:
        self.policy, self.pacer_window, self.run, self._decide = rules.policy, rules.pacer_window, run, decide
        self.wait = rules.wait

    # ------------------------------------------------------------ time

    def restarted(self, round_: RoundFacts | None, down: float) -> None:
        """Move the deadlines by the downtime, within limits; request an interrupted fold again."""
        if round_ is None:
            return
        more = min(down, self.policy.outage_max - round_.extended)
        round_.extended += more
        round_.select_by += more
        round_.first_by += more if round_.first_by else 0.0
        round_.deadline += more
        round_.grace_by += more
        round_.linger_by = None if round_.linger_by is None else round_.linger_by + more
        round_.is_drawing = False
        if round_.is_aggregating:
            self.aggregate(round_)

    def stood_still(self, round_: RoundFacts | None, seconds: float) -> None:
        """Move the deadlines by a time in which none could pass, and tell the invited clients."""
        if round_ is None:
            return
        round_.select_by += seconds
        round_.first_by += seconds if round_.first_by else 0.0
        round_.deadline += seconds
        round_.grace_by += seconds
        round_.linger_by = None if round_.linger_by is None else round_.linger_by + seconds
        for client_id in round_.with_fate(Fate.WAITING) if round_.is_collecting else ():
            if client_id in self.run.connected:
                self._invite(round_, client_id)

    def let_time_pass(self, round_: RoundFacts, now: float) -> bool:
        """Let the first deadline pass, if it is over; return whether it is."""
        if round_.is_selecting and not round_.is_drawing and now >= round_.select_by:
            self._selecting_is_over(round_, now)
            return True
        if round_.is_selecting and not round_.is_drawing and round_.first_by and now >= round_.first_by:
            round_.first_by = 0.0
            self.draw_if_enough(round_, now)
            return True
        return round_.is_collecting and self._collecting_is_over(round_, now)

    def _selecting_is_over(self, round_: RoundFacts, now: float) -> None:
        run = self.run
        if not self._makes_quorum(round_) and any(c in run.connected for c in run.resting):
            run.wake()
        counted = {*round_.reported, *round_.late, *run.available}
        if self._makes_quorum(round_):
            run.settled_for = len(run.connected) if self.wait is not None else 0
            self._draw(round_)
        elif run.may_wait_for_approvals(counted, now, self.policy):
            assert run.approval_by is not None
            round_.select_by = min(run.approval_by, now + self.policy.selection_timeout)
        else:
            for_approvals = {c for c, waits in run.declined.items() if waits}
            is_refused = len(for_approvals | counted) >= self.policy.quorum_count
            look_again = None if is_refused else run.may_wait(round_, now, self.wait)
            if look_again is None:
                self.abandon(round_, AbandonReason.TOO_FEW_CLIENTS)
            else:
                round_.select_by = look_again

    def _makes_quorum(self, round_: RoundFacts) -> bool:
        """Return whether the available clients, with the late updates, can make the quorum."""
        available = self.run.available
        return bool(available) and _within_reach(round_, available) >= self.policy.quorum_count

    def next_wake(self, round_: RoundFacts) -> float:
        """Return the earliest end of a rest that matters now: the round would invite the client."""
        return self.run.next_wake() if round_.is_selecting and not round_.is_drawing else math.inf

    def _collecting_is_over(self, round_: RoundFacts, now: float) -> bool:
        lingered = round_.linger_by is not None and now >= round_.linger_by
        if lingered and (round_.is_in_grace or round_.linger_by < round_.deadline):  # type: ignore[operator]
            self._close(round_, CloseReason.LINGER_OVER)
        elif round_.is_in_grace and now >= round_.grace_by:
            self._close_or_abandon(round_, CloseReason.GRACE_OVER, AbandonReason.BELOW_QUORUM, now)
        elif not round_.is_in_grace and now >= round_.deadline:
            uploading = any(round_.began_in_time(c) for c in round_.with_fate(Fate.WAITING))
            if uploading and self.policy.grace > 0:
                round_.is_in_grace, round_.grace_by = True, round_.deadline + self.policy.grace
                self.let_it_end(round_, now)
            else:
                self._close_or_abandon(round_, CloseReason.DEADLINE, AbandonReason.BELOW_QUORUM, now)
        else:
            return False
        return True

    # ------------------------------------------------------------ selecting

    def opened(self, round_id: RoundId, now: float) -> RoundFacts:
        """Open a round, with the late updates of earlier rounds."""
        run = self.run
        run.forget_old_rounds(most=max(3, self.policy.max_staleness + 2))
        round_ = RoundFacts(round_id, run.version, now + self.policy.selection_timeout, quorum=self.policy.quorum_count)
        round_.first_by = now + FIRST_WAIT_S if round_id == 1 else 0.0
        round_.late, run.carried = run.carried, {}
        return round_

    def draw_if_enough(self, round_: RoundFacts, now: float) -> None:
        """Request a draw if enough clients are connected, and enough of them available."""
        if round_.is_awaiting_clients and self._makes_quorum(round_):
            round_.waiting_since, round_.select_by = None, now + self.policy.selection_timeout
        needed = max(self.policy.num_needed_to_draw, self.policy.first_available if round_.first_by else 0)
        needed = min(needed, self.run.settled_for or needed)
        enough = len(self.run.connected) >= needed
        enough &= len(self.run.available) >= needed or self._makes_quorum(round_)
        if enough and round_.is_selecting and not round_.is_drawing:
            self._draw(round_)

    def _draw(self, round_: RoundFacts) -> None:
        round_.is_drawing = True
        view = self.run.sampler_view
        candidates, relaxed = view.candidates(self.run.available), view.relaxed(self.pacer_window)
        count = min(self.policy.num_invited, len(candidates))
        self._decide("draw", round_.round_id, count, candidates, 0, relaxed)

    def drawn(self, round_: RoundFacts, clients: tuple[ClientId, ...], now: float) -> None:
        """Invite the drawn clients."""
        if not round_.is_drawing:
            return
        run, seconds = self.run, self.policy.deadline
        round_.is_drawing, round_.is_selecting = False, False
        round_.fates = {c: Fate.LOST if c in run.lost else Fate.WAITING for c in clients}
        run.sampler_view.chosen.update(clients)
        round_.deadline = now + (run.adaptive_seconds(clients, self.policy) if seconds == "adaptive" else seconds)
        for client_id in round_.with_fate(Fate.WAITING):
            self._invite(round_, client_id)

    def _invite(self, round_: RoundFacts, client_id: ClientId) -> None:
        self._decide("invite", client_id, round_.round_id, round_.base, round(round_.deadline, 6))

    # ------------------------------------------------------------ collecting

    def came_back(self, client_id: ClientId, working_on: tuple[RoundId, ...], now: float) -> None:
        """Release a connecting client from unwanted work, and repeat its invitation to the open round."""
        for round_id in working_on:
            self._release_unless_wanted(client_id, round_id)
        if self.run.round is not None:
            self._joined(self.run.round, client_id, now)

    def _joined(self, round_: RoundFacts, client_id: ClientId, now: float) -> None:
        if round_.is_collecting and round_.fates.get(client_id) in (Fate.WAITING, Fate.LOST):
            round_.fates[client_id] = Fate.WAITING
            self._invite(round_, client_id)
        self.draw_if_enough(round_, now)

    def _release_unless_wanted(self, client_id: ClientId, round_id: RoundId) -> None:
        """Release a client from a round, unless the round is collecting or has accepted its update."""
        round_ = self.run.invitation(client_id, round_id)
        if round_ is None:
            self._decide("release", client_id, round_id, False)
        elif not round_.is_collecting and (client_id, round_id) not in self.run.accepted:
            may_submit = self.policy.late == "next_round" and self.run.is_open
            self._decide("release", client_id, round_id, may_submit)

    def gave_up(self, client_id: ClientId, round_id: RoundId | None, fate: Fate) -> None:
        """End the wait for a client, in one round or (None) in the open one."""
        round_ = self.run.round
        if round_ is None or not round_.is_collecting or round_id not in (None, round_.round_id):
            return
        if round_.fates.get(client_id) is Fate.WAITING:
            round_.fates[client_id] = fate

    def upload_begun(self, client_id: ClientId, round_id: RoundId, now: float) -> None:
        """Take the time of an upload's beginning, for the grace period."""
        round_ = self.run.open(round_id)
        if round_ is not None and round_.may_report(client_id):
            round_.begun.setdefault(client_id, now)

    def let_it_end(self, round_: RoundFacts, now: float) -> None:
        """Close or abandon the round as soon as its outcome cannot improve, or it needs no more updates."""
        policy = self.policy
        if round_.abandon_reason is None:
            self.draw_if_enough(round_, now)
        if not round_.is_collecting:
            return
        if len(round_.reported) >= policy.cohort_size:
            self._close(round_, CloseReason.ENOUGH)
        elif self._waits_for_silent(round_):
            pass
        elif not round_.awaited and round_.with_fate(Fate.WAITING):
            self._close_or_abandon(round_, CloseReason.DEADLINE, AbandonReason.BELOW_QUORUM, now)
        elif not round_.awaited:
            self._close_or_abandon(round_, CloseReason.ALL_ANSWERED, AbandonReason.QUORUM_OUT_OF_REACH, now)
        elif _within_reach(round_, round_.awaited) < policy.quorum_count:
            self._below_quorum(round_, AbandonReason.QUORUM_OUT_OF_REACH, now)
        elif policy.linger is not None and round_.linger_by is None and len(round_.reported) >= policy.quorum_count:
            round_.linger_by = now + policy.linger
            if policy.linger == 0:
                self._close(round_, CloseReason.LINGER_OVER)

    def lost(self, round_: RoundFacts, digests: Collection[Digest]) -> None:
        """Go on without updates that are lost: fold the others, or abandon a closed round below its quorum."""
        lost = [u.client_id for u in (*round_.late.values(), *round_.reported.values()) if u.digest in digests]
        round_.lost += lost
        round_.late = {c: u for c, u in round_.late.items() if u.digest not in digests}
        round_.reported = {c: u for c, u in round_.reported.items() if u.digest not in digests}
        if lost and round_.is_aggregating:
            if _within_reach(round_) < self.policy.quorum_count:
                self.abandon(round_, AbandonReason.FILES_LOST)
            else:
                self.aggregate(round_)
        elif lost and len(round_.reported) < self.policy.quorum_count:
            round_.linger_by = None

    def _waits_for_silent(self, round_: RoundFacts) -> bool:
        """Return whether only the clients that are lost by silence can make the quorum before the deadline."""
        quorum = self.policy.quorum_count
        silent = {c for c in round_.with_fate(Fate.LOST) if c in self.run.silent}
        if round_.is_in_grace or not silent or _within_reach(round_, round_.awaited) >= quorum:
            return False
        is_elsewhere = len({*round_.late, *self.run.available}) >= quorum
        return not is_elsewhere and _within_reach(round_, (*round_.awaited, *silent)) >= quorum

    # ------------------------------------------------------------ the end

    def _close_or_abandon(self, round_: RoundFacts, close: CloseReason, abandon: AbandonReason, now: float) -> None:
        if _within_reach(round_) >= self.policy.quorum_count:
            self._close(round_, close)
        else:
            self._below_quorum(round_, abandon, now)

    def _below_quorum(self, round_: RoundFacts, reason: AbandonReason, now: float) -> None:
        """Abandon the round; not as a failure if its quorum is out of reach only for want of approvals."""
        counted = (*round_.reported, *round_.late, *round_.with_fate(Fate.WAITING))
        in_time = counted if reason is AbandonReason.QUORUM_OUT_OF_REACH else (*round_.reported, *round_.late)
        if round_.lost and len({*in_time, *round_.lost}) >= self.policy.quorum_count:
            reason = AbandonReason.FILES_LOST
        elif self.run.may_wait_for_approvals(counted, now, self.policy):
            reason = AbandonReason.AWAITS_APPROVAL
        elif self.run.lacks_only_the_away(round_, in_time, self.wait):
            reason = AbandonReason.AWAITS_CLIENTS
        self.abandon(round_, reason)

    def _close(self, round_: RoundFacts, reason: CloseReason) -> None:
        is_early = reason in (CloseReason.ENOUGH, CloseReason.LINGER_OVER)
        self._release(round_, Fate.RELEASED if is_early else Fate.STRAGGLER, may_submit=True)
        round_.close_reason = reason
        self.aggregate(round_)

    def stop(self, round_: RoundFacts) -> None:
        """Abandon a round that does not aggregate yet, on the operator's command."""
        self.abandon(round_, AbandonReason.STOP_REQUESTED)

    def committed(self, *, is_last: bool) -> None:
        """Do nothing: the clients were released when the round closed."""

    def run_ended(self) -> None:
        """Do nothing: the clients were released when the round ended."""

    def training(self) -> Collection[ClientId]:
        """Return the clients that train after the end of a round: none."""
        return ()

    def abandon(self, round_: RoundFacts, reason: AbandonReason) -> None:
        """Abandon the round, and release its clients."""
        self._release(round_, Fate.STRAGGLER, may_submit=reason is not AbandonReason.STOP_REQUESTED)
        round_.abandon_reason = reason
        self._decide("abandon", round_.round_id, reason)

    def _release(self, round_: RoundFacts, fate: Fate, *, may_submit: bool) -> None:
        for client_id in round_.with_fate(Fate.WAITING):
            round_.fates[client_id] = fate
            self._decide("release", client_id, round_.round_id, may_submit and self.policy.late == "next_round")

    def aggregate(self, round_: RoundFacts) -> None:
        """Request the fold of the round's updates, with their weights."""
        policy, weights = self.policy, []
        for update in round_.contributions():
            staleness = round_.base - update.base_version
            is_own = update.round_id == round_.round_id
            scale = 1.0 if is_own else discount_of(staleness, policy)
            scale *= update.work if policy.partial_work == "scaled" else 1.0
            weights.append((update.client_id, update.digest, update.num_examples, round(scale, 9)))
        self._decide("aggregate", round_.round_id, round_.base, tuple(sorted(weights)))

    def note(self, update: e.Update, verdict: Verdict, reason: RejectReason | None, now: float) -> None:
        """Record the consequences of a verdict."""
        run, round_ = self.run, self.run.rounds.get(update.round_id)
        if round_ is None or verdict in (Verdict.NOT_HIS, Verdict.AGAIN):
            return
        fates = {Verdict.REFUSED: Fate.REFUSED, Verdict.LATE: Fate.LATE, Verdict.CARRIED: Fate.CARRIED}
        round_.fates[update.client_id] = fates.get(verdict, Fate.REPORTED)
        if verdict is Verdict.LATE and reason is not None:
            round_.late_because[update.client_id] = reason
        elif verdict is Verdict.CARRIED:
            run.accept(update)
            run.carry(update)
        elif verdict is Verdict.ON_TIME:
            run.accept(update)
            run.sampler_view.measured(update, now - round_.begun.get(update.client_id, now))
            round_.reported[update.client_id] = update


def _within_reach(round_: RoundFacts, more: Iterable[ClientId] = ()) -> int:
    """Return the number of distinct clients with an accepted update that counts here, or that may still send one."""
    return len({*round_.reported, *round_.late, *more})

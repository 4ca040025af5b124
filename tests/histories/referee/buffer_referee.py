"""The referee of an asynchronous run: the invitations, their deadlines, and the updates and scales of each version.

It derives them from the papers and `docs/configuration.md`, not from the machine: it has no table of training clients,
which follow from the fates of all invitations.
"""

import math
from collections.abc import Callable, Collection

from atoll.protocol.vocabulary import AbandonReason, ClientId, CloseReason, Digest, Fate, RejectReason, RoundId
from atoll.server.rounds import events as e
from atoll.server.rounds.run_rules import RunRules
from tests.histories.referee.run_facts import BufferFacts, RoundFacts, RunFacts
from tests.histories.referee.verdicts import Verdict, discount_of


class BufferReferee:
    """The referee of the buffers, in the place of `RoundReferee` for a synchronous run."""

    def __init__(self, rules: RunRules, run: RunFacts, decide: Callable[..., None]) -> None:
        self.policy, self.pacer_window, self.run, self._decide = rules.policy, rules.pacer_window, run, decide
        self.wait = rules.wait
        self.size = self.policy.buffer_size if self.policy.mode == "fedbuff" else 1

    # ------------------------------------------------------------ training clients

    def training(self) -> dict[ClientId, BufferFacts]:
        """Return the clients whose updates are awaited, with the round of each."""
        return {
            client_id: _buffer(round_)
            for round_ in self.run.rounds.values()
            for client_id, fate in round_.fates.items()
            if fate is Fate.WAITING
        }

    def _is_young(self, round_: RoundFacts) -> bool:
        """Return whether updates from the round's version may still count."""
        return self.run.version <= round_.base + self.policy.max_staleness

    def _ineligible(self, round_: RoundFacts) -> set[ClientId]:
        """Return the clients that train, were invited in this round, or have an update from its version that counts."""
        accepted = self.run.accepted.items()
        done = {c for (c, _), a in accepted if a.update.base_version == round_.base and not a.is_left}
        return done | set(self.training()) | set(round_.fates)

    # ------------------------------------------------------------ time

    def restarted(self, round_: RoundFacts | None, down: float) -> None:
        """Move the deadlines of the buffer and of each invitation; request an interrupted fold again."""
        for client_id, invited in self.training().items():
            more = min(down, self.policy.outage_max - invited.moved.get(client_id, 0.0))
            invited.due[client_id] += more
            invited.moved[client_id] = invited.moved.get(client_id, 0.0) + more
        if round_ is None:
            return
        more = min(down, self.policy.outage_max - round_.extended)
        round_.extended += more
        round_.select_by += more
        round_.is_drawing = False
        if round_.is_aggregating:
            self.aggregate(round_)

    def stood_still(self, round_: RoundFacts | None, seconds: float) -> None:
        """Move the deadlines by a time in which none could pass, and tell the clients that train."""
        if round_ is not None:
            round_.select_by += seconds
        for client_id, invited in self.training().items():
            invited.due[client_id] += seconds
            if client_id in self.run.connected:
                self._invite(client_id, invited)

    def next_due(self) -> float:
        """Return the earliest deadline of an invitation; infinity if no client trains."""
        return min((r.due[c] for c, r in self.training().items()), default=math.inf)

    def buffer_due(self, round_: RoundFacts | None) -> float:
        """Return the deadline of the open buffer; infinity if it has passed or does not matter any more."""
        if round_ is None or not round_.is_collecting or _buffer(round_).is_overdue:
            return math.inf
        return round_.select_by

    def next_wake(self, round_: RoundFacts) -> float:
        """Return the earliest end of a rest that matters now: the buffer would invite the client."""
        may_draw = round_.is_collecting and not _buffer(round_).is_overdue and not round_.is_drawing
        return self.run.next_wake() if may_draw else math.inf

    def let_invitations_end(self) -> None:
        """End the invitations with the earliest deadline, and ask for partial updates that may still count."""
        due = self.next_due()
        for client_id, round_ in self.training().items():
            if round_.due[client_id] == due:
                round_.fates[client_id] = Fate.STRAGGLER
                self._decide("release", client_id, round_.round_id, self._is_young(round_))

    def let_buffer_end(self, round_: RoundFacts, now: float) -> None:
        """End the time of a buffer that is not full, or wait on for clients if none trains and none asks for time."""
        lacks = len(_buffer(round_).filled) < self.policy.quorum_count and not self.training()
        lacks &= not any(self.run.declined.values()) and (not round_.is_drawing or round_.waiting_since is not None)
        if lacks and (look_again := self.run.may_wait(round_, now, self.wait)) is not None:
            round_.select_by = look_again
            return
        _buffer(round_).is_overdue, round_.is_drawing = True, False

    # ------------------------------------------------------------ the buffer

    def opened(self, round_id: RoundId, now: float) -> BufferFacts:
        """Open a buffer, and fill it with waiting updates as far as there is room."""
        run = self.run
        run.forget_rounds_before(run.version - self.policy.max_staleness)
        round_ = BufferFacts(round_id, run.version, now + self.policy.fill_timeout, quorum=self.policy.quorum_count)
        round_.filled, run.waiting = run.waiting[: self.size], run.waiting[self.size :]
        return round_

    def let_it_end(self, round_: RoundFacts, now: float) -> None:
        """Close or abandon the buffer if nothing can improve it any more; otherwise fill free places."""
        buffer = _buffer(round_)
        if not buffer.is_collecting:
            return
        makes_quorum, training = len(buffer.filled) >= self.policy.quorum_count, self.training()
        if len(buffer.filled) == self.size:
            self._close(buffer, CloseReason.ENOUGH)
        elif buffer.is_overdue:
            if makes_quorum:
                self._close(buffer, CloseReason.DEADLINE)
            elif not training:
                self._below_quorum(buffer, AbandonReason.BELOW_QUORUM, now)
        elif not buffer.is_drawing:
            self._fill_places(buffer, makes_quorum, len(training), now)

    def lost(self, round_: RoundFacts, digests: Collection[Digest]) -> None:
        """Go on without updates that are lost: fold the others, or abandon a closed buffer below its quorum."""
        buffer = _buffer(round_)
        lost = [update.client_id for update in buffer.filled if update.digest in digests]
        buffer.lost += lost
        buffer.filled = [update for update in buffer.filled if update.digest not in digests]
        if lost and buffer.is_aggregating:
            if len(buffer.filled) < self.policy.quorum_count:
                self.abandon(buffer, AbandonReason.FILES_LOST)
            else:
                self.aggregate(buffer)

    def _below_quorum(self, round_: BufferFacts, reason: AbandonReason, now: float) -> None:
        """Abandon the buffer; not as a failure if its quorum is out of reach only for want of approvals."""
        counted = [update.client_id for update in round_.filled]
        in_vain = round_.waiting_since is not None or (not round_.filled and not round_.fates)
        reason = AbandonReason.TOO_FEW_CLIENTS if in_vain else reason
        if round_.lost and len(round_.filled) + len(round_.lost) >= self.policy.quorum_count:
            reason = AbandonReason.FILES_LOST
        elif self.run.may_wait_for_approvals(counted, now, self.policy):
            reason = AbandonReason.AWAITS_APPROVAL
        elif not in_vain and self.run.lacks_only_the_away(round_, counted, self.wait):
            reason = AbandonReason.AWAITS_CLIENTS
        self.abandon(round_, reason)

    def _fill_places(self, round_: BufferFacts, makes_quorum: bool, num_training: int, now: float) -> None:
        """Request a draw for free places; without eligible or training clients, close or abandon the buffer."""
        eligible = sorted(set(self.run.available) - self._ineligible(round_))
        free = self.policy.concurrency - num_training
        if eligible and free > 0:
            round_.is_drawing = True
            view, count = self.run.sampler_view, min(free, len(eligible))
            relaxed = view.relaxed(self.pacer_window)
            self._decide("draw", round_.round_id, count, view.candidates(eligible), round_.num_draws, relaxed)
            round_.num_draws += 1
        elif num_training == 0 and makes_quorum:
            self._close(round_, CloseReason.ALL_ANSWERED)
        elif num_training == 0:
            accepted = {c for (c, r), a in self.run.accepted.items() if r == round_.round_id and not a.is_lost}
            available = self.run.available
            if any(c in available and c not in accepted for c in round_.fates):
                self._below_quorum(round_, AbandonReason.QUORUM_OUT_OF_REACH, now)

    def drawn(self, round_: RoundFacts, clients: tuple[ClientId, ...], now: float) -> None:
        """Invite the drawn clients that are still eligible, while there are free places.

        A client that has disconnected since the draw takes a place, too; if its lease has ended, it counts as lost.
        """
        buffer = _buffer(round_)
        if not buffer.is_collecting or not buffer.is_drawing:
            return
        buffer.is_drawing = False
        if buffer.waiting_since is not None:
            buffer.waiting_since, buffer.select_by = None, now + self.policy.fill_timeout
        for client_id in sorted(clients):
            if client_id in self._ineligible(buffer) or len(self.training()) >= self.policy.concurrency:
                continue
            self.run.sampler_view.chosen[client_id] += 1
            buffer.due[client_id] = now + self._seconds(client_id)
            buffer.fates[client_id] = Fate.LOST if client_id in self.run.lost else Fate.WAITING
            if client_id not in self.run.lost:
                self._invite(client_id, buffer)

    def _seconds(self, client_id: ClientId) -> float:
        """Return the seconds of an invitation until its deadline."""
        policy, measured = self.policy, self.run.sampler_view.seconds.get(client_id)
        if policy.deadline != "adaptive":
            return policy.deadline
        if measured is None:
            return policy.deadline_max
        return min(policy.deadline_max, max(policy.deadline_min, sum(measured) * policy.adaptive_margin))

    def _invite(self, client_id: ClientId, round_: BufferFacts) -> None:
        self._decide("invite", client_id, round_.round_id, round_.base, round(round_.due[client_id], 6))

    # ------------------------------------------------------------ clients

    def came_back(self, client_id: ClientId, working_on: tuple[RoundId, ...], now: float) -> None:
        """Repeat a returning client's newest invitation if it still counts, and release the client from other rounds.

        Args:
            client_id: the client.
            working_on: the rounds that it works on.
            now: the present time.
        """
        invitations = filter(None, (self.run.invitation(client_id, round_id) for round_id in self.run.rounds))
        newest = max(invitations, key=lambda round_: round_.round_id, default=None)
        if newest is not None and self.run.is_open:  # an overdue deadline may just have ended the run
            self._repeat_invitation(client_id, _buffer(newest), now)
        for round_id in working_on:
            self._release_unless_wanted(client_id, round_id)

    def _repeat_invitation(self, client_id: ClientId, round_: BufferFacts, now: float) -> None:
        """Repeat an invitation whose update is awaited, or was given up before its deadline and may still count."""
        is_in_time = now < round_.due[client_id] and self._is_young(round_)
        if round_.fates[client_id] is Fate.LOST and is_in_time:
            round_.fates[client_id] = Fate.WAITING
        if round_.fates[client_id] is Fate.WAITING:
            self._invite(client_id, round_)

    def _release_unless_wanted(self, client_id: ClientId, round_id: RoundId) -> None:
        """Release a client from a round, unless its update is awaited or was accepted."""
        round_ = self.run.invitation(client_id, round_id)
        if round_ is None:
            self._decide("release", client_id, round_id, False)
            return
        is_awaited = self.training().get(client_id) is round_
        is_accepted = (client_id, round_id) in self.run.accepted
        if not is_awaited and not is_accepted:
            may_submit = self.run.is_open and self._is_young(round_)
            self._decide("release", client_id, round_id, may_submit)

    def gave_up(self, client_id: ClientId, round_id: RoundId | None, fate: Fate) -> None:
        """End a client's invitation, in one round or (None) in any, which frees its place."""
        round_ = self.training().get(client_id)
        if round_ is not None and round_id in (None, round_.round_id):
            round_.fates[client_id] = fate

    def upload_begun(self, client_id: ClientId, round_id: RoundId, now: float) -> None:
        """Take the time of an upload's beginning, from which its duration is measured."""
        round_ = self.training().get(client_id)
        if round_ is not None and round_.round_id == round_id:
            round_.begun.setdefault(client_id, now)

    def note(self, update: e.Update, verdict: Verdict, reason: RejectReason | None, now: float) -> None:
        """Record the consequences of a verdict."""
        run, round_ = self.run, self.run.rounds.get(update.round_id)
        if round_ is None or verdict in (Verdict.NOT_HIS, Verdict.AGAIN):
            return
        fates = {Verdict.REFUSED: Fate.REFUSED, Verdict.LATE: Fate.LATE, Verdict.ON_TIME: Fate.REPORTED}
        round_.fates[update.client_id] = fates[verdict]
        if reason is not None and verdict is Verdict.LATE:
            round_.late_because[update.client_id] = reason
        if verdict is Verdict.ON_TIME:
            run.accept(update)
            run.sampler_view.measured(update, now - round_.begun.get(update.client_id, now))
            is_open = run.round is not None and run.round.is_collecting
            (_buffer(run.round).filled if is_open and run.round else run.waiting).append(update)
            repeated = self.training().get(update.client_id)  # a second invitation for the same version
            if repeated is not None and repeated.base == update.base_version:
                self._let_go(update.client_id, repeated)

    # ------------------------------------------------------------ the end

    def stop(self, round_: RoundFacts) -> None:
        """Stop the run: close the buffer for the last version if it has a quorum; otherwise abandon it."""
        buffer = _buffer(round_)
        if len(buffer.filled) >= self.policy.quorum_count:
            self._close(buffer, CloseReason.FLUSHED)
            self.run.is_stop_wanted = True
        else:
            self.abandon(round_, AbandonReason.STOP_REQUESTED)

    def committed(self, *, is_last: bool) -> None:
        """Release the clients whose updates can no longer count after a commit."""
        for client_id, round_ in self.training().items():
            if is_last or not self._is_young(round_):
                self._let_go(client_id, round_)

    def run_ended(self) -> None:
        """Release all training clients."""
        for client_id, round_ in self.training().items():
            self._let_go(client_id, round_)

    def _let_go(self, client_id: ClientId, round_: BufferFacts) -> None:
        round_.fates[client_id] = Fate.RELEASED
        self._decide("release", client_id, round_.round_id, False)

    def _close(self, round_: BufferFacts, reason: CloseReason) -> None:
        round_.close_reason = reason
        self.aggregate(round_)

    def abandon(self, round_: RoundFacts, reason: AbandonReason) -> None:
        """Abandon the buffer; clients continue to train."""
        round_.abandon_reason = reason
        self._decide("abandon", round_.round_id, reason)

    def aggregate(self, round_: RoundFacts) -> None:
        """Request the fold of the buffer's updates, with versions and scales."""
        policy, rows, filled = self.policy, [], round_.contributions()
        for update in filled:
            age = round_.base - update.base_version
            scale = discount_of(age, policy)
            scale *= update.work if policy.partial_work == "scaled" else 1.0
            scale *= policy.alpha if policy.mode == "fedasync" else 1.0
            rows.append((update.client_id, update.digest, update.num_examples, round(scale, 9), update.base_version))
        order = sorted(range(len(rows)), key=lambda k: (filled[k].client_id, filled[k].round_id))
        self._decide("aggregate", round_.round_id, round_.base, tuple(rows[k] for k in order), policy.mode)


def _buffer(round_: RoundFacts) -> BufferFacts:
    """Return a round as the buffer that every round of an asynchronous run is."""
    assert isinstance(round_, BufferFacts)
    return round_

"""Judges an asynchronous run by its policy alone: who trains, until when, which updates make a version, and how scaled.

Read from the papers and `docs/configuration.md`, not from the machine: nothing here looks at a table of who trains; it
follows from the fates of all invitations.
"""

import math
from collections.abc import Callable

from atoll.protocol.vocabulary import AbandonReason, ClientId, CloseReason, Fate, RejectReason, RoundId
from atoll.server.rounds import events as e
from atoll.server.rounds.update_intake import RunRules
from atoll.simulations.histories.facts import Books, BufferFacts, RoundFacts
from atoll.simulations.histories.verdicts import Verdict, discount_of


class BufferReferee:
    """Stands where `RoundReferee` stands for a synchronous run."""

    def __init__(self, rules: RunRules, books: Books, decide: Callable[..., None]) -> None:
        self.policy, self.pacer_window, self.books, self._decide = rules.policy, rules.pacer_window, books, decide
        self.size = self.policy.buffer_size if self.policy.mode == "fedbuff" else 1

    # ------------------------------------------------------------ who trains

    def training(self) -> dict[ClientId, BufferFacts]:
        """Whose update is awaited, and from which round."""
        return {
            client_id: self._facts(round_)
            for round_ in self.books.rounds.values()
            for client_id, fate in round_.fates.items()
            if fate is Fate.WAITING
        }

    def _facts(self, round_: RoundFacts) -> BufferFacts:
        assert isinstance(round_, BufferFacts)
        return round_

    def _is_young(self, round_: RoundFacts) -> bool:
        return self.books.version <= round_.base + self.policy.max_staleness

    def _askable(self, round_: RoundFacts) -> list[ClientId]:
        """Who may be invited: there, idle, not asked in this round, without an update that counts for its version."""
        done = {
            c for (c, _), a in self.books.accepted.items() if a.update.base_version == round_.base and not a.is_left
        }
        busy = done | set(self.training()) | set(round_.fates)
        return sorted(set(self.books.connected) - busy)

    # ------------------------------------------------------------ time

    def restarted(self, round_: RoundFacts | None, down: float) -> None:
        """The buffer's and each invitation's deadline move; a fold under way is asked for again."""
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

    def next_due(self) -> float:
        """The earliest deadline of an invitation; infinity when nobody trains."""
        return min((r.due[c] for c, r in self.training().items()), default=math.inf)

    def buffer_due(self, round_: RoundFacts | None) -> float:
        """When the open buffer should be full; infinity when that no longer matters."""
        if round_ is None or not round_.is_collecting or self._facts(round_).is_overdue:
            return math.inf
        return round_.select_by

    def let_invitations_end(self) -> None:
        """Those with the earliest deadline: told to stop, and to hand in what they have."""
        due = self.next_due()
        for client_id, round_ in self.training().items():
            if round_.due[client_id] == due:
                round_.fates[client_id] = Fate.STRAGGLER
                self._decide("release", client_id, round_.round_id, self._is_young(round_))

    def let_buffer_end(self, round_: RoundFacts) -> None:
        """It is not full in time."""
        self._facts(round_).is_overdue, round_.is_drawing = True, False

    # ------------------------------------------------------------ the buffer

    def opened(self, round_id: RoundId, now: float) -> BufferFacts:
        """What waits goes in first, as much as there is room for."""
        books = self.books
        books.forget_rounds_before(books.version - self.policy.max_staleness)
        round_ = BufferFacts(round_id, books.version, now + self.policy.fill_timeout)
        round_.filled, books.waiting = books.waiting[: self.size], books.waiting[self.size :]
        return round_

    def let_it_end(self, round_: RoundFacts, now: float) -> None:
        """Full, or as good as it will get; and a free place does not stay free."""
        facts = self._facts(round_)
        if not facts.is_collecting:
            return
        makes_quorum, training = len(facts.filled) >= self.policy.quorum_count, self.training()
        if len(facts.filled) == self.size:
            self._close(facts, CloseReason.ENOUGH)
        elif facts.is_overdue:
            if makes_quorum:
                self._close(facts, CloseReason.DEADLINE)
            elif not training:
                nothing = not facts.filled and not facts.fates
                self.abandon(facts, AbandonReason.TOO_FEW_CLIENTS if nothing else AbandonReason.BELOW_QUORUM)
        elif not facts.is_drawing:
            self._fill_places(facts, makes_quorum, len(training))

    def _fill_places(self, round_: BufferFacts, makes_quorum: bool, num_training: int) -> None:
        askable, free = self._askable(round_), self.policy.concurrency - num_training
        if askable and free > 0:
            round_.is_drawing = True
            known, count = self.books.known, min(free, len(askable))
            relaxed = known.relaxed(self.pacer_window)
            self._decide("draw", round_.round_id, count, known.candidates(askable), round_.num_draws, relaxed)
            round_.num_draws += 1
        elif num_training == 0 and makes_quorum:
            self._close(round_, CloseReason.ALL_ANSWERED)
        elif num_training == 0:
            accepted = {c for c, r in self.books.accepted if r == round_.round_id}
            if any(c in self.books.connected and c not in accepted for c in round_.fates):
                self.abandon(round_, AbandonReason.QUORUM_OUT_OF_REACH)

    def drawn(self, round_: RoundFacts, clients: tuple[ClientId, ...], now: float) -> None:
        """The sampler has answered."""
        facts = self._facts(round_)
        if not facts.is_collecting or not facts.is_drawing:
            return
        facts.is_drawing = False
        there = self.books.connected
        for client_id in sorted(clients):
            self.books.connected = {**there, client_id: "drawn"}  # it was there when it was drawn
            may_be_asked = client_id in self._askable(facts)
            self.books.connected = there
            if may_be_asked and len(self.training()) < self.policy.concurrency:
                self.books.known.chosen[client_id] += 1
                facts.due[client_id] = now + self._seconds(client_id)
                facts.fates[client_id] = Fate.LOST if client_id in self.books.lost else Fate.WAITING
                if client_id not in self.books.lost:
                    self._invite(client_id, facts)

    def _seconds(self, client_id: ClientId) -> float:
        policy, known = self.policy, self.books.known.seconds.get(client_id)
        if policy.deadline != "adaptive":
            return policy.deadline
        if known is None:
            return policy.deadline_max
        return min(policy.deadline_max, max(policy.deadline_min, sum(known) * policy.adaptive_margin))

    def _invite(self, client_id: ClientId, round_: BufferFacts) -> None:
        self._decide("invite", client_id, round_.round_id, round_.base, round(round_.due[client_id], 6))

    # ------------------------------------------------------------ clients

    def came_back(self, client_id: ClientId, working_on: tuple[RoundId, ...], now: float) -> None:
        """It is told again what it trains for, and to stop what no longer counts."""
        books = self.books
        known = [r for r in books.rounds.values() if client_id in r.fates and not r.is_forgotten]
        if known and books.is_open:  # what was overdue may just have ended it
            last = self._facts(max(known, key=lambda r: r.round_id))
            in_time = now < last.due[client_id] and self._is_young(last)
            if last.fates[client_id] is Fate.LOST and in_time:
                last.fates[client_id] = Fate.WAITING
            if last.fates[client_id] is Fate.WAITING:
                self._invite(client_id, last)
        for round_id in working_on:
            round_ = books.rounds.get(round_id)
            is_known = round_ is not None and client_id in round_.fates and not round_.is_forgotten
            if is_known and ((client_id, round_id) in books.accepted or self.training().get(client_id) is round_):
                continue
            may_submit = is_known and books.is_open and round_ is not None and self._is_young(round_)
            self._decide("release", client_id, round_id, may_submit)

    def gave_up(self, client_id: ClientId, round_id: RoundId | None, fate: Fate) -> None:
        """Its place is free."""
        round_ = self.training().get(client_id)
        if round_ is not None and round_id in (None, round_.round_id):
            round_.fates[client_id] = fate

    def upload_begun(self, client_id: ClientId, round_id: RoundId, now: float) -> None:
        """From here on the upload is measured."""
        round_ = self.training().get(client_id)
        if round_ is not None and round_.round_id == round_id:
            round_.begun.setdefault(client_id, now)

    def note(self, update: e.Update, verdict: Verdict, reason: RejectReason | None, now: float) -> None:
        """What a verdict changes."""
        books, round_ = self.books, self.books.rounds.get(update.round_id)
        if round_ is None or verdict in (Verdict.NOT_HIS, Verdict.AGAIN):
            return
        fates = {Verdict.REFUSED: Fate.REFUSED, Verdict.LATE: Fate.LATE, Verdict.ON_TIME: Fate.REPORTED}
        round_.fates[update.client_id] = fates[verdict]
        if reason is not None and verdict is Verdict.LATE:
            round_.late_because[update.client_id] = reason
        if verdict is Verdict.ON_TIME:
            books.accept(update, was_late=False)
            books.known.measured(update, now - round_.begun.get(update.client_id, now))
            is_open = books.round is not None and books.round.is_collecting
            (self._facts(books.round).filled if is_open and books.round else books.waiting).append(update)
            twin = self.training().get(update.client_id)  # asked again for the same version meanwhile
            if twin is not None and twin.base == update.base_version:
                self._let_go(update.client_id, twin)

    # ------------------------------------------------------------ the end

    def stop(self, round_: RoundFacts) -> None:
        """What is in becomes the last version if it makes the quorum."""
        if len(self._facts(round_).filled) >= self.policy.quorum_count:
            self._close(self._facts(round_), CloseReason.FLUSHED)
            self.books.is_stop_wanted = True
        else:
            self.abandon(round_, AbandonReason.STOP_REQUESTED)

    def committed(self, *, is_last: bool) -> None:
        """Nobody is released by a commit, but those whose update can no longer count."""
        for client_id, round_ in self.training().items():
            if is_last or not self._is_young(round_):
                self._let_go(client_id, round_)

    def run_ended(self) -> None:
        """Nobody trains on."""
        for client_id, round_ in self.training().items():
            self._let_go(client_id, round_)

    def _let_go(self, client_id: ClientId, round_: BufferFacts) -> None:
        round_.fates[client_id] = Fate.RELEASED
        self._decide("release", client_id, round_.round_id, False)

    def _close(self, round_: BufferFacts, reason: CloseReason) -> None:
        round_.close_reason = reason
        self.aggregate(round_)

    def abandon(self, round_: RoundFacts, reason: AbandonReason) -> None:
        """No model comes of this buffer; who trains goes on."""
        round_.abandon_reason = reason
        self._decide("abandon", round_.round_id, reason)

    def aggregate(self, round_: RoundFacts) -> None:
        """Which updates, from which versions, and scaled by how much (architecture, invariants 3 and 4)."""
        policy, rows, filled = self.policy, [], round_.contributions()
        for update in filled:
            age = round_.base - update.base_version
            assert 0 <= age <= policy.max_staleness, f"{update} is {age} versions old"
            scale = discount_of(age, policy)
            scale *= update.work if policy.partial_work == "scaled" else 1.0
            scale *= policy.alpha if policy.mode == "fedasync" else 1.0
            rows.append((update.client_id, update.digest, update.num_examples, round(scale, 9), update.base_version))
        assert len({(u.client_id, u.base_version) for u in filled}) == len(filled), "twice from one version"
        assert policy.quorum_count <= len(filled) <= self.size, "below quorum, or more than fit"
        order = sorted(range(len(rows)), key=lambda k: (filled[k].client_id, filled[k].round_id))
        self._decide("aggregate", round_.round_id, round_.base, tuple(rows[k] for k in order), policy.mode)

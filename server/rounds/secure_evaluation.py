"""The secure sums of an evaluation by clients, or of statistics: requests, the sessions of clients, their sums. Pure.

    keys       each client evaluates the version, and sends its keys in place of its metrics
    session    shares, masked words, signatures, reveals, as of an update's sum; the words come in a message
    over       the sum's metrics, or the reason why there are none

The clients are divided into sessions at random. A session that loses too many members before its survivors are told
makes another attempt, over the same metrics. No metric of a single client is known at any time.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from atoll.ground.printable import count_of
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import Answer, MaskedWords, MemberKeys, Reveal
from atoll.protocol.secure.session_size import MEMBERS_MIN, TWO_THIRDS, threshold_of
from atoll.protocol.vocabulary import ClientId, FailureReason, Purpose, RoundId
from atoll.server.rounds.client_evaluation import SILENT, ClientEvaluation
from atoll.server.rounds.events import AskEvaluation, CloseEvaluation, Effect, Sums
from atoll.server.rounds.one_sum import OneSum
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.record import RefusalRecord
from atoll.server.rounds.secure_rules import SecureRules
from atoll.server.rounds.session_events import (
    KeysCame,
    MaskedCame,
    MemberAnswered,
    OfMember,
    OpeningFailed,
    OpenSum,
    SessionLeft,
    SumOpened,
    SumPlace,
)
from atoll.server.sessions.session import Fail, Stage, Tell
from atoll.server.sessions.session import OpenSum as OpenWith
from atoll.task.metrics import merge

Step = Callable[[], Iterable[Tell | OpenWith | Fail]]


class SecureEvaluation:
    """The sums of one evaluation. Its sessions open with two thirds of their members, as their sizes are not known.

    Args:
        evaluation: the clients that were asked, and the deadline for their keys.
        rules: of the run's secure sums.
        seed: of the run.
        ask: returns the request to a client.
        purpose: of the sums.
        sessions: the clients of each session, and the fewest members of its sum; empty: they are divided at random.
    """

    def __init__(
        self,
        evaluation: ClientEvaluation,
        rules: SecureRules,
        seed: int,
        ask: Callable[[ClientId], AskEvaluation],
        purpose: Purpose = "evaluation",
        sessions: Sequence[tuple[Sequence[ClientId], int]] = (),
    ) -> None:
        self.evaluation, self._rules, self._ask, self._purpose = evaluation, rules, ask, purpose
        if not sessions:
            name = f"evaluation {seed} {evaluation.version}"
            sessions = [(members, MEMBERS_MIN) for members in divided(evaluation.asked, rules, name)]
        self._sums = [OneSum(session) for session in range(len(sessions))]
        self._least = [least for _, least in sessions]
        self._sessions = {client_id: number for number, (members, _) in enumerate(sessions) for client_id in members}
        self._words: dict[ClientId, bytes] = {}  # of the newest attempt of its sum
        self._found: dict[int, Sums] = {}  # of each opened sum
        self._why: dict[ClientId, str] = {}  # of those that have refused others
        for client_id, session in self._sessions.items():
            self._sums[session].asked.add(client_id)
        for each in self._sums:
            each.by = evaluation.deadline

    # ------------------------------------------------------------ state

    @property
    def number(self) -> RoundId:
        """The evaluated version, in the place of a round's number in the events of its sums."""
        return RoundId(self.evaluation.version)

    @property
    def deadline(self) -> float:
        """The time at which `time_passed` must be called [s since the epoch]; infinite: a sum is being opened."""
        return min(each.by for each in self._running)

    @property
    def is_complete(self) -> bool:
        """Whether each sum is over."""
        return not any(self._running)

    @property
    def _running(self) -> Iterator[OneSum]:
        return (each for each in self._sums if not each.is_over)

    @property
    def measuring(self) -> list[ClientId]:
        """The clients whose keys for a first attempt are awaited: they evaluate the version."""
        return sorted(client_id for each in self._running if each.attempt == 1 for client_id in each.asked)

    @property
    def missing(self) -> list[ClientId]:
        """The clients whose next message is awaited, sorted."""
        found: list[ClientId] = []
        for each in self._running:
            names = each.names
            found += each.asked if each.session is None else (names[at] for at in each.session.missing())
        return sorted(found)

    def members(self, session: int) -> list[ClientId]:
        """Return the members of a session by position."""
        return self._sums[session].names

    def lost(self) -> dict[int, str]:
        """Return why sessions that are over have no sum, by their numbers."""
        return {each.record.session: each.record.detail for each in self._sums if each.is_over and not each.is_opened}

    def place_of(self, client_id: ClientId) -> SumPlace:
        """Return the session and the newest attempt of a client that was asked."""
        of = self._sums[self._sessions[client_id]]
        return SumPlace(of.record.session, of.attempt)

    def is_news_of(self, event: OfMember) -> bool:
        """Return whether a member's message can change the evaluation: it is made an event only then."""
        if (of := self._named(event)) is None or event.client_id in self.evaluation.failures:
            return False
        if of.session is not None and event.client_id in of.aside:
            return False
        match event:
            case KeysCame(client_id):
                return of.session is None and client_id in of.asked
            case SessionLeft():
                return True
            case MaskedCame(client_id):
                session, position = of.session, of.position_of(client_id)
                is_masking = session is not None and session.stage is Stage.MASKING and position in session.masking
                return is_masking and client_id not in self._words
        return of.session is not None and event.client_id in of.keys

    def _named(self, event: OfMember) -> OneSum | None:
        """Return the sum that an event belongs to; None: of another version, another attempt, or over."""
        if event.round_id != self.number or self._sessions.get(event.client_id) != event.session:
            return None
        of = self._sums[event.session]
        return None if of.is_over or of.attempt != event.attempt else of

    # ------------------------------------------------------------ clients

    def asked(self, client_id: ClientId) -> AskEvaluation:
        """Return the request to a client, for the newest attempt at its sum."""
        of = self._sums[self._sessions[client_id]]
        return replace(self._ask(client_id), deadline=of.by, sum=self.place_of(client_id))

    def joined(self, client_id: ClientId) -> Effects:
        """Repeat what a client that has connected again was asked."""
        session = self._sessions.get(client_id)
        if session is None or client_id in self.evaluation.failures or (of := self._sums[session]).is_over:
            return ()
        if of.session is None:
            return (self.asked(client_id),)
        position = of.position_of(client_id)
        told = [] if position is None else of.session.returned(position)
        return tuple(of.told(effect, self.number, self._purpose) for effect in told if isinstance(effect, Tell))

    def gave_up(self, client_id: ClientId, why: str, now: float) -> Effects:
        """Continue without a client: it failed, is lost, or has left its session. Words that are in still count."""
        session = self._sessions.get(client_id)
        if session is None or client_id in self.evaluation.failures or (of := self._sums[session]).is_over:
            return ()
        self.evaluation.failures[client_id] = why
        of.aside.discard(client_id)
        return self._without(of, client_id, why, now)

    def _without(self, of: OneSum, client_id: ClientId, why: str, now: float) -> Effects:
        """Continue an attempt without a client."""
        if of.session is not None:
            position, its = of.position_of(client_id), of.session
            return () if position is None else self._advance(of, now, lambda: its.left(position, why))
        of.keys.pop(client_id, None)
        of.asked.discard(client_id)
        return () if of.asked else self._begin(of, now)

    # ------------------------------------------------------------ events

    def came(self, event: OfMember, now: float) -> Effects:
        """Take a member's message."""
        if not self.is_news_of(event):
            return ()
        of, client_id = self._sums[event.session], event.client_id
        if isinstance(event, SessionLeft):
            return self._left(of, event, now)
        if isinstance(event, KeysCame):
            if (fault := of.repeated(keys := _content(event))) is not None:
                return self.gave_up(client_id, f"{FailureReason.SESSION_REFUSED}: {fault}", now)
            of.keys[client_id] = keys
            of.asked.discard(client_id)
            return () if of.asked else self._begin(of, now)
        session, position = of.session, of.position_of(client_id)
        assert session is not None
        assert position is not None
        if isinstance(event, MaskedCame):
            self._words[client_id] = _words(event)
            return self._advance(of, now, lambda: session.masked(position))
        answer = _answer(event) if event.content else Reveal((0,) * len(session.masking))  # of one that is over
        effects = self._advance(of, now, lambda: session.answered(position, answer))
        if position in session.gone:
            self.evaluation.failures.setdefault(client_id, session.gone[position])
        return effects

    def _left(self, of: OneSum, event: SessionLeft, now: float) -> Effects:
        """Continue without a client that has left; one that refuses others may join another attempt without them."""
        client_id, why = event.client_id, f"{event.reason}: {event.detail}" if event.detail else str(event.reason)
        refused = [name for name in event.refused if name in of.keys and name != client_id]
        if not (refused and of.may_refuse):
            return self.gave_up(client_id, why, now)
        of.record.refusals.append(RefusalRecord(client_id, refused, event.detail))
        of.aside.add(client_id)
        self._why[client_id] = why
        return self._without(of, client_id, why, now)

    def sum_opened(self, event: SumOpened) -> None:
        """Record the metrics of a sum, or why it has none."""
        if (of := self._awaiting(event)) is None:
            return
        of.opened(event)
        of.record.is_dropped, of.record.detail = bool(event.fault), event.fault
        if not event.fault:
            self._found[event.session] = event.statistics

    def opening_failed(self, event: OpeningFailed, now: float) -> Effects:
        """Wait for another reveal, or end the session: too few of its reveals are right."""
        if (of := self._awaiting(event)) is None or (session := of.session) is None:
            return ()
        of.opening, of.record.detail = None, event.detail
        of.by = now + self._rules.stage_timeout
        return self._advance(of, now, session.refused)

    def _awaiting(self, event: SumOpened | OpeningFailed) -> OneSum | None:
        if event.round_id != self.number or event.session >= len(self._sums):
            return None
        of = self._sums[event.session]
        return of if of.awaits(event) else None

    # ------------------------------------------------------------ time

    def time_passed(self, now: float) -> Effects:
        """Apply the deadlines that have passed: of keys, or of a stage."""
        effects: Effects = ()
        for each in [each for each in self._running if each.by <= now]:
            effects += self._begin(each, now) if each.session is None else self._advance(each, now, each.session.due)
        return effects

    def extend(self, seconds: float) -> None:
        """Move all deadlines by a time during which nothing could arrive."""
        for each in self._sums:
            each.by += seconds

    def pending(self) -> Effects:
        """Return the openings that a restart of the coordinator repeats."""
        return tuple(self._opening(each) for each in self._running if each.opening is not None)

    # ------------------------------------------------------------ sessions

    def _begin(self, of: OneSum, now: float) -> Effects:
        """Send the roster of a sum, or end it: too few clients have sent keys."""
        for client_id in sorted(of.asked):
            self.evaluation.failures[client_id] = SILENT
        of.asked.clear()
        members, least = len(of.keys), self._least[of.record.session]
        if members < least:
            why = f"{count_of(members, 'member')}; needed: {least}"
            return self._fails(of, why, may_repeat=False, now=now)
        begun = of.begin(threshold_of(TWO_THIRDS, members), least, now + self._rules.stage_timeout)
        return self._carried_out(of, begun, now)

    def _advance(self, of: OneSum, now: float, step: Step) -> Effects:
        """Carry out a step of a session; a new stage has a new deadline."""
        session = of.session
        assert session is not None
        before = session.stage
        effects = [*step()]
        if session.stage is not before and not session.is_over:
            of.record.stage, of.by = session.stage, now + self._rules.stage_timeout
        return self._carried_out(of, effects, now)

    def _carried_out(self, of: OneSum, effects: Iterable[Tell | OpenWith | Fail], now: float) -> Effects:
        found: list[Effect] = []
        for effect in effects:
            match effect:
                case Tell():
                    found.append(of.told(effect, self.number, self._purpose))
                case OpenWith():
                    of.opening, of.by = effect, float("inf")
                    found.append(self._opening(of))
                case Fail(reason, may_repeat):
                    found += self._fails(of, reason, may_repeat=may_repeat, now=now)
        return tuple(found)

    def _opening(self, of: OneSum) -> OpenSum:
        words = tuple(self._words[name] for name in of.survivors)
        return OpenSum(self.number, of.summed(), self._purpose, words)

    def _fails(self, of: OneSum, reason: str, *, may_repeat: bool, now: float) -> Effects:
        """End an attempt without a sum: make another one with the members that are left, or end the session."""
        failures = self.evaluation.failures
        left = {client_id for client_id in of.names if client_id not in failures}
        of.record.left_out = sorted(of.without(left))
        left -= {*of.record.left_out}
        of.record.detail = f"attempt {of.attempt}: {reason}"
        if not (may_repeat and len(left) >= self._least[of.record.session] and of.attempt < self._rules.attempts):
            of.fail()
            return ()
        for client_id in of.names:
            self._words.pop(client_id, None)
        for client_id in of.record.left_out:
            failures[client_id] = self._why.get(client_id) or f"it was left out: {self._refusal_of(of, client_id)}"
        of.aside.clear()
        of.begin_attempt(left, now + self._rules.stage_timeout)
        return tuple(self.asked(client_id) for client_id in sorted(left))

    def _refusal_of(self, of: OneSum, client_id: ClientId) -> str:
        refusal = next(each for each in of.record.refusals if client_id in each.of)
        return f"{refusal.by} refuses it: {refusal.detail}"

    # ------------------------------------------------------------ the end

    def close(self) -> CloseEvaluation:
        """Return the metrics over all sums; a client that is in none has the reason."""
        summed, failures = self.outcome()
        sums = merge(self._found.values()) if summed else None
        return CloseEvaluation(self.evaluation.version, {}, failures, {}, summed=summed, sums=sums)

    def outcome(self) -> tuple[tuple[ClientId, ...], dict[ClientId, str]]:
        """Return the clients in opened sums, sorted, and of every other one the reason why it is in none."""
        closed, failures = self.evaluation, dict(self.evaluation.failures)
        summed: list[ClientId] = []
        for each in self._sums:
            if each.is_opened:
                summed += each.survivors
        for client_id in closed.asked:
            if client_id in summed:
                failures.pop(client_id, None)  # it has left after its words were in
            elif client_id not in failures:
                of = self._sums[self._sessions[client_id]]
                failures[client_id] = self._why.get(client_id) or (
                    f"its secure sum has no result: {of.record.detail}" if not of.is_opened else SILENT
                )
        return tuple(sorted(summed)), failures


def divided(clients: Iterable[ClientId], rules: SecureRules, name: str) -> list[list[ClientId]]:
    """Divide clients into sessions of about one size, at random by a name."""
    order = [*clients]
    random.Random(name).shuffle(order)
    number = len(rules.sizes(len(order))) or 1
    return [order[session::number] for session in range(number)]


def _content(event: KeysCame) -> MemberKeys:
    keys = wire.answer_from(bytes.fromhex(event.content))
    assert isinstance(keys, MemberKeys)
    return keys


def _words(event: MaskedCame) -> bytes:
    if not event.content:  # of an evaluation that is over
        return b""
    masked = wire.answer_from(bytes.fromhex(event.content))
    assert isinstance(masked, MaskedWords)
    return masked.words


def _answer(event: MemberAnswered) -> Answer:
    answer = wire.answer_from(bytes.fromhex(event.content))
    assert isinstance(answer, Answer)
    return answer

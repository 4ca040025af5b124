"""A round with secure sums: a round with a cohort whose updates come masked, and open together. Pure.

    COLLECTING --KeysCame counts as an answer of the client; closed as any round-> SECURING
    SECURING   --each session: shares, masked updates, signatures, reveals------> AGGREGATING, with what opened
    SECURING   --no session opened, or fewer members than the quorum------------> ABANDONED (secure_failed)
    AGGREGATING --Aggregated, enough members in the sums that count-------------> COMMITTED

The cohort is divided into sessions at random, each of at most `session_max` members. A session that loses too many
members before its survivors are told makes another attempt: with new keys, over the same encoded updates. A session
that ends without a sum costs its members this round, and the others nothing.

Where the members add the noise of a private sum, each member is charged for each attempt before it is told its boxes:
with them its masked update may leave, and whatever becomes of it, nothing is refunded.
"""

import math
import random
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace

from atoll.ground.printable import count_of
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import Answer, Gone, MaskedWords, MemberKeys, Reveal
from atoll.protocol.secure.session_size import MEMBERS_MIN, threshold_of
from atoll.protocol.vocabulary import (
    TROUBLES,
    AbandonReason,
    ClientId,
    CloseReason,
    Digest,
    FailureReason,
    Fate,
    Phase,
    RejectReason,
    ReleaseReason,
    RoundId,
    Version,
)
from atoll.server.members.membership import Membership
from atoll.server.rounds.cohort_round import MAY_REPORT, Round
from atoll.server.rounds.events import (
    Accept,
    Aggregate,
    Aggregated,
    AggregationFailed,
    Contribution,
    Invite,
    Release,
    Update,
)
from atoll.server.rounds.one_sum import OneSum
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.record import DROPPED_SUMS, ClientRecord, MemberRecord, RefusalRecord
from atoll.server.rounds.retries import let_rest
from atoll.server.rounds.run_rules import RunRules
from atoll.server.rounds.secure_rules import SecureRules
from atoll.server.rounds.session_events import (
    KeysCame,
    MaskedCame,
    MemberAnswered,
    OpeningFailed,
    OpenSum,
    SessionEvent,
    SessionLeft,
    SharesCame,
    SharesRevealed,
    SumOpened,
    SumPlace,
    SurvivorsSigned,
    TellMember,
)
from atoll.server.rounds.update_claims import fault_of, learn, measure, note_accepted, reject
from atoll.server.sessions.session import Fail, Stage, Tell
from atoll.server.sessions.session import OpenSum as OpenWith

_REFUSED = FailureReason.SESSION_REFUSED
_LOST = "a masked update was lost on the coordinator's disk"

DROPPED_MAX = 6
"""Rounds in a row in which a client's sums were dropped for what was added, after which it rests."""
REST_ROUNDS = 12
"""Rounds for which such a client rests at first."""
DOUBLINGS_MAX = 6
"""Largest number of times that its rest is doubled."""


class SecureRound(Round):
    """Round whose updates are secure sums. `ranges`: exponents of the float tensors' ranges, in canonical order."""

    is_secure = True

    def __init__(
        self,
        round_id: RoundId,
        base_version: Version,
        rules: RunRules,
        membership: Membership,
        ranges: tuple[int, ...],
        now: float,
    ) -> None:
        super().__init__(round_id, base_version, rules, membership, {}, now)
        assert rules.secure is not None
        self._secure: SecureRules = rules.secure
        self._seed, self._ranges = rules.seed, ranges
        self._sums: list[OneSum] = []
        self._sessions: dict[ClientId, int] = {}
        self._lost_sums: set[int] = set()
        self._charged: list[ClientId] = []  # for each attempt whose masked updates may leave
        self.record.ranges = [*ranges]

    # ------------------------------------------------------------ time

    @property
    def deadline(self) -> float | None:
        """The time at which `time_passed` must be called [s since the epoch]; None: no timer runs."""
        if self.phase is not Phase.SECURING:
            return super().deadline
        by = min((each.by for each in self._running), default=math.inf)
        return by if by < math.inf else None

    def time_passed(self, now: float) -> Effects:
        """Apply the deadline: of the collection, or of the stages of sessions."""
        if self.phase is not Phase.SECURING:
            return super().time_passed(now)
        effects: Effects = ()
        for each in [each for each in self._running if each.by <= now]:
            effects += self._begin(each, now) if each.session is None else self._advance(each, now, each.session.due)
        return (*effects, *self._conclude(now))

    def stood_still(self, seconds: float) -> Effects:
        """Move every deadline by `seconds` during which time stood still, and repeat what clients were asked."""
        for each in self._sums:
            each.by += seconds
        effects = super().stood_still(seconds)
        joined = (client_id for client_id, _ in self.record.with_fate(Fate.JOINED, Fate.REPORTED))
        there = [client_id for client_id in joined if self.membership.is_connected(client_id)]
        return (*effects, *(effect for client_id in there for effect in self._asked_again(client_id)))

    def coordinator_started(self, down_since: float, now: float) -> Effects:
        """Extend the deadlines by the downtime, and repeat a pending aggregation or opening."""
        effects = super().coordinator_started(down_since, now)
        pending = (each for each in self._running if each.opening is not None)
        return (*effects, *(OpenSum(self.record.round_id, each.summed()) for each in pending))

    def _extend(self, seconds: float, now: float) -> None:
        super()._extend(seconds, now)
        for _, row in self.record.with_fate(Fate.JOINED):
            row.disconnected_at = row.disconnected_at or now

    @property
    def _running(self) -> Iterator[OneSum]:
        return (each for each in self._sums if not each.is_over)

    # ------------------------------------------------------------ collecting

    def cohort_drawn(self, clients: tuple[ClientId, ...], now: float) -> Effects:
        """Divide the drawn cohort into sessions, and invite it."""
        if self.phase is not Phase.SELECTING or not self._is_drawing:
            return ()
        order = sorted(clients)
        random.Random(f"sessions {self._seed} {self.record.round_id}").shuffle(order)
        number = max(1, len(self._secure.sizes(len(order))))
        self._sums = [OneSum(session) for session in range(number)]
        self.record.sums = [each.record for each in self._sums]
        self._sessions = {client_id: place % number for place, client_id in enumerate(order)}
        return super().cohort_drawn(clients, now)

    def _invitation(self, client_id: ClientId, deadline: float) -> Invite:
        of = self._sum_of(client_id)
        if self.phase is Phase.SECURING:
            deadline = of.by
        self.record.clients[client_id].sum = self.record.clients[client_id].sum or MemberRecord(of.record.session)
        return replace(super()._invitation(client_id, deadline), sum=self.place_of(client_id))

    def place_of(self, client_id: ClientId) -> SumPlace:
        """Return the place of an invited client: its session, and the newest attempt."""
        of = self._sum_of(client_id)
        return SumPlace(of.record.session, of.attempt, self._ranges)

    def _sum_of(self, client_id: ClientId) -> OneSum:
        return self._sums[self._sessions[client_id]]

    @property
    def _answered(self) -> list[ClientId]:
        """The clients of the cohort that count towards the quorum: their keys are in."""
        if self.phase in (Phase.SELECTING, Phase.COLLECTING):
            return [client_id for client_id, _ in self.record.with_fate(Fate.JOINED)]
        return [*self._reported]

    def _keys_came(self, event: KeysCame, now: float) -> Effects:
        """Count the keys of a client: its update is encoded, and it takes part."""
        client_id, row = event.client_id, self.record.clients.get(event.client_id)
        if row is None or (of := self._named(event)) is None or of.session is not None or client_id in of.keys:
            return ()
        if self.phase is Phase.COLLECTING and row.fate in MAY_REPORT:
            self._set_fate(client_id, Fate.JOINED, now)
        elif client_id not in of.asked:
            return ()
        keys = _content(event)
        assert isinstance(keys, MemberKeys)
        if (fault := of.repeated(keys)) is not None:
            row.sum = MemberRecord(event.session, event.attempt)
            left = SessionLeft(client_id, event.round_id, event.session, event.attempt, _REFUSED, fault)
            return self._session_left(left, now)
        of.keys[client_id] = keys
        of.asked.discard(client_id)
        row.sum = MemberRecord(event.session, event.attempt, now)
        if self.phase is Phase.COLLECTING:
            return self._settle(now)
        return (*self._begin(of, now), *self._conclude(now)) if not of.asked else ()

    def session_event(self, event: SessionEvent, now: float) -> Effects:
        """Apply an event of a session; one of another attempt, or of a session that is over, changes nothing."""
        match event:
            case KeysCame():
                return self._keys_came(event, now)
            case SessionLeft():
                return self._session_left(event, now)
            case SumOpened():
                return self._sum_opened(event, now)
            case OpeningFailed():
                return self._opening_failed(event, now)
            case MaskedCame():  # an update is uploaded
                return ()
            case _:
                return self._member_answered(event, now)

    def is_news_of(self, event: KeysCame | MemberAnswered | SessionLeft) -> bool:
        """Return whether an event of a client's session can change the round: it is made an event only then."""
        row = self.record.clients.get(event.client_id)
        if row is None or row.sum is None or (of := self._named(event)) is None:
            return False
        if isinstance(event, KeysCame):
            is_wanted = self.phase is Phase.COLLECTING and row.fate in MAY_REPORT
            return of.session is None and event.client_id not in of.keys and (is_wanted or event.client_id in of.asked)
        if isinstance(event, SessionLeft):
            is_awaited = self.phase is Phase.COLLECTING and row.fate is Fate.WAITING
            return is_awaited or (row.fate in (Fate.JOINED, Fate.REPORTED) and not row.sum.left)
        return of.session is not None and not of.session.is_over and event.client_id in of.keys

    def _named(self, event: KeysCame | MemberAnswered | SessionLeft) -> OneSum | None:
        """Return the sum that an event belongs to; None: the client is in another one, or this one is over."""
        if self._sessions.get(event.client_id) != event.session or self._sums[event.session].attempt != event.attempt:
            return None
        of = self._sums[event.session]
        return None if of.is_over else of

    # ------------------------------------------------------------ clients

    def client_joined(self, client_id: ClientId, now: float) -> Effects:
        """Repeat what a client that has (re)connected was asked."""
        row = self.record.clients.get(client_id)
        if row is None or row.fate not in (Fate.JOINED, Fate.REPORTED):
            return super().client_joined(client_id, now)
        row.num_reconnects += row.disconnected_at is not None
        row.disconnected_at = None
        return tuple(self._asked_again(client_id))

    def _asked_again(self, client_id: ClientId) -> Iterable[Invite | TellMember]:
        of, deadline = self._sum_of(client_id), self.record.deadline
        if self.phase is Phase.COLLECTING and deadline is not None:
            return [self._invitation(client_id, deadline)]
        if self.phase is not Phase.SECURING or of.is_over:
            return []
        if of.session is None:
            return [self._invitation(client_id, of.by)] if client_id in of.asked else []
        position = of.position_of(client_id)
        told = [] if position is None else of.session.returned(position)
        return [of.told(effect, self.record.round_id) for effect in told if isinstance(effect, Tell)]

    def client_disconnected(self, client_id: ClientId, now: float) -> None:
        """Record that the client's control stream has ended; its lease still runs."""
        row = self.record.clients.get(client_id)
        if row is not None and row.fate is Fate.JOINED:
            row.disconnected_at = now
        super().client_disconnected(client_id, now)

    def client_gave_up(self, client_id: ClientId, fate: Fate, reason: str, detail: str, now: float) -> Effects:
        """Record that a client has FAILED, was REFUSED or is LOST, and continue without it."""
        row = self.record.clients.get(client_id)
        if row is None or row.fate not in (Fate.JOINED, Fate.REPORTED):
            return super().client_gave_up(client_id, fate, reason, detail, now)
        return self._leaves(client_id, row, fate, reason, detail, now)

    def _session_left(self, event: SessionLeft, now: float) -> Effects:
        """Continue without a client that has left its session, or whose message was refused."""
        row, of = self.record.clients.get(event.client_id), self._named(event)
        if row is None or of is None:
            return ()
        if refused := [name for name in event.refused if name in of.keys and name != event.client_id]:
            of.record.refusals.append(RefusalRecord(event.client_id, refused, event.detail))
            if row.fate is Fate.JOINED and of.may_refuse:
                of.aside.add(event.client_id)
        if event.client_id not in of.aside:
            self._note_trouble(event.client_id, event.reason, event.detail, now)
        if row.fate is Fate.WAITING:  # it was restarted after its promise, and before its keys came
            if self.phase is Phase.COLLECTING and row.sum is not None:
                row.sum.left = f"{event.reason}: {event.detail}" if event.detail else event.reason
            return self.client_gave_up(event.client_id, Fate.FAILED, event.reason, event.detail, now)
        if row.fate not in (Fate.JOINED, Fate.REPORTED):
            return ()
        return self._leaves(event.client_id, row, Fate.FAILED, event.reason, event.detail, now)

    def _leaves(
        self, client_id: ClientId, row: ClientRecord, fate: Fate, reason: str, detail: str, now: float
    ) -> Effects:
        of = self._sum_of(client_id)
        if row.sum is not None:
            row.sum.left = f"{reason}: {detail}" if detail else reason
        is_aside = client_id in of.aside and reason == _REFUSED
        if not is_aside:
            of.aside.discard(client_id)
        if row.fate is Fate.JOINED and not is_aside:
            self._set_fate(client_id, fate, now, reason, detail)
        if of.session is None:
            of.keys.pop(client_id, None)
            if self.phase is Phase.COLLECTING:
                return self._settle(now)
            is_awaited = client_id in of.asked
            of.asked.discard(client_id)
            return (*self._begin(of, now), *self._conclude(now)) if is_awaited and not of.asked else ()
        position, session = of.position_of(client_id), of.session
        if position is None or of.is_over:
            return ()
        effects = self._advance(of, now, lambda: session.left(position, row.sum.left if row.sum else reason))
        return (*effects, *self._conclude(now))

    # ------------------------------------------------------------ masked updates

    def upload_begun(self, client_id: ClientId, now: float) -> None:
        """Record the start of a masked update's upload."""
        row = self.record.clients.get(client_id)
        if row is not None and row.fate is Fate.JOINED:
            row.upload_begun_at = row.upload_begun_at or now

    def is_open_for(self, update: Update) -> bool:
        """Return whether this masked update can still be in its session's sum."""
        of, row = self._sessions.get(update.client_id), self.record.clients.get(update.client_id)
        if self.phase is not Phase.SECURING or of is None or row is None or row.fate is not Fate.JOINED:
            return False
        if row.sum is None or row.sum.left or update.attempt != self._sums[of].attempt:
            return False
        session, position = self._sums[of].session, self._sums[of].position_of(update.client_id)
        return session is not None and session.stage is Stage.MASKING and position in session.masking

    def update_received(self, update: Update, now: float) -> Effects:
        """Accept a masked update, or refuse it: its client is in no session that still takes one."""
        row = self.record.clients[update.client_id]
        if not self.is_open_for(update):
            named = f"attempt {update.attempt}" if update.attempt else "no attempt"
            detail = f"the round is {self.phase}, and takes no masked update of {update.client_id} of {named} now"
            return (reject(update, RejectReason.NOT_IN_SESSION, detail),)
        if fault := fault_of(
            update, base_version=self.record.base_version, policy=self.policy, membership=self.membership
        ):
            effects = self._leaves(update.client_id, row, Fate.REFUSED, *fault, now)
            return (reject(update, *fault), *effects)
        self._set_fate(update.client_id, Fate.REPORTED, now)
        self._reported[update.client_id] = update
        note_accepted(row, update)
        measure(self.membership, row, update, now)
        if row.sum is not None:
            row.sum.masked_at = now
        of = self._sum_of(update.client_id)
        position, session = of.position_of(update.client_id), of.session
        assert position is not None
        assert session is not None
        effects = self._advance(of, now, lambda: session.masked(position))
        return (Accept(update.client_id, update.round_id, update.digest), *effects, *self._conclude(now))

    # ------------------------------------------------------------ sessions

    def _member_answered(self, event: MemberAnswered, now: float) -> Effects:
        """Take a member's answer to the session's question."""
        of, row = self._named(event), self.record.clients.get(event.client_id)
        if of is None or of.session is None or row is None or (position := of.position_of(event.client_id)) is None:
            return ()
        session = of.session
        answer = _content(event) if event.content else Reveal((0,) * len(session.masking))  # of a round that has ended
        assert isinstance(answer, Answer)
        if row.sum is not None:
            match event:
                case SharesCame():
                    row.sum.shares_at = row.sum.shares_at or now
                case SurvivorsSigned():
                    row.sum.signed_at = row.sum.signed_at or now
                case SharesRevealed():
                    row.sum.revealed_at = row.sum.revealed_at or now
        effects = self._advance(of, now, lambda: session.answered(position, answer))
        if position in session.gone and row.sum is not None and not row.sum.left:
            row.sum.left = session.gone[position]
            if row.fate is Fate.JOINED:
                self._set_fate(event.client_id, Fate.FAILED, now, FailureReason.SESSION_REFUSED, row.sum.left)
        return (*effects, *self._conclude(now))

    def _sum_opened(self, event: SumOpened, now: float) -> Effects:
        """Record that a session's sum is open."""
        if (of := self._awaiting_opening(event)) is None:
            return ()
        of.opened(event)
        if not self._is_shared:  # else each attempt was charged
            self._charge(sorted(of.survivors))
        return self._conclude(now)

    def _opening_failed(self, event: OpeningFailed, now: float) -> Effects:
        """Wait for another reveal, or end the session: too few of its reveals are right."""
        of = self._awaiting_opening(event)
        if of is None or (session := of.session) is None:
            return ()
        of.opening, of.record.detail = None, event.detail
        of.by = now + self._secure.stage_timeout
        return (*self._advance(of, now, session.refused), *self._conclude(now))

    def _awaiting_opening(self, event: SumOpened | OpeningFailed) -> OneSum | None:
        of = self._sums[event.session] if event.session < len(self._sums) else None
        return of if of is not None and of.awaits(event) else None

    def _begin(self, of: OneSum, now: float) -> Effects:
        """Send the roster of a sum, or end it: too few clients have sent keys."""
        names = of.names
        threshold = threshold_of(self._secure.threshold, len(names))
        if len(names) < max(MEMBERS_MIN, threshold, self._secure.sum_min):
            need = f"{max(threshold, self._secure.sum_min)}, by {self._threshold_as_set}"
            if max(threshold, self._secure.sum_min) <= MEMBERS_MIN:
                need = f"{MEMBERS_MIN} in any sum: a larger round.cohort_size or round.deadline"
            reason = f"{count_of(len(names), 'member')} with keys; needed: {need}"
            return self._fails(of, reason, may_repeat=False, now=now)
        begun = of.begin(threshold, self._secure.sum_min, now + self._secure.stage_timeout)
        return self._carried_out(of, begun, now)

    def _advance(self, of: OneSum, now: float, step: Callable[[], Iterable[Tell | OpenWith | Fail]]) -> Effects:
        """Carry out a step of a session; a new stage has a new deadline."""
        session = of.session
        assert session is not None
        before = session.stage
        effects = [*step()]
        found: Effects = ()
        if session.stage is not before and not session.is_over:
            of.record.stage, of.by = session.stage, now + self._secure.stage_timeout
            if session.stage is Stage.MASKING:  # an upload may take as long as that of a plain update
                of.by = max(of.by, self.record.deadline or of.by)
                found = self._charge_attempt([of.names[position] for position in session.masking])
        found += self._carried_out(of, effects, now)
        is_last = of.session is session and not of.may_refuse
        return (*found, *self._send_home(of, of.aside, now)) if is_last and not of.is_over else found

    @property
    def _is_shared(self) -> bool:
        """Whether the members add the noise of a private sum."""
        return self._privacy is not None and self._privacy.noise_by == "clients"

    @property
    def _is_sampled(self) -> bool:
        """Whether the members' updates are of a random sample of their examples.

        Two noises on one sample cost more than two steps with a sample each, so masked updates leave once in a round.
        """
        return self._is_shared and self._privacy is not None and not self._privacy.hides_clients

    def _charge_attempt(self, clients: Iterable[ClientId]) -> Effects:
        """Charge the members of an attempt that add noise, before the boxes that let their masked updates leave."""
        if not self._is_shared:
            return ()
        assert self._privacy is not None
        for client_id in sorted(clients):
            self.membership.charge(client_id, self._privacy)
            self._charged.append(client_id)
        self._note_charge(self._privacy, len({*self._charged}), len(self._charged))
        return super()._audited_charge()

    def _audited_charge(self) -> Effects:
        return () if self._is_shared else super()._audited_charge()

    def _carried_out(self, of: OneSum, effects: Iterable[Tell | OpenWith | Fail], now: float) -> Effects:
        found: Effects = ()
        for effect in effects:
            match effect:
                case Tell():
                    found += (of.told(effect, self.record.round_id),)
                case OpenWith():
                    of.opening, of.by = effect, math.inf
                    found += (OpenSum(self.record.round_id, of.summed()),)
                case Fail(reason, may_repeat):
                    by = f"{reason}, by {self._threshold_as_set}"
                    found += self._fails(of, by, may_repeat=may_repeat, now=now)
        return found

    @property
    def _threshold_as_set(self) -> str:
        most = count_of(self._secure.sum_min, "member")
        noise = f" and privacy.honest_min, of {most}" if self._secure.sum_min else ""
        return f"secure.threshold = {self._secure.threshold}{noise}"

    def _fails(self, of: OneSum, reason: str, *, may_repeat: bool, now: float) -> Effects:
        """End an attempt without a sum: make another one with the members that are left, or end the session."""
        left = [c for c in of.names if self.record.clients[c].fate in (Fate.JOINED, Fate.REPORTED)]
        left = [c for c in left if (row := self.record.clients[c].sum) is not None and not row.left]
        spent = {c for c in {*left, *of.aside} if not self.membership.has_budget(c)}  # by the attempt that has failed
        out = of.without({*left, *of.aside} - spent)
        left = sorted({*left, *of.aside} - out - spent)
        threshold = threshold_of(self._secure.threshold, len(left))
        is_enough = len(left) >= max(MEMBERS_MIN, threshold, self._secure.sum_min)
        gone = [(c, row.left) for c in of.names if (row := self.record.clients[c].sum) is not None and row.left]
        first = f"; {gone[0][0]} has left: {gone[0][1]}" if gone else ""
        others = f" ({count_of(len(gone) - 1, 'other member')} left, too)" if len(gone) > 1 else ""
        budget = f"; {count_of(len(spent), 'member')} have no privacy budget for another attempt" if spent else ""
        of.record.detail = f"attempt {of.attempt}: {reason}{first}{others}{budget}"
        of.aside -= spent
        if self._is_sampled and not {*of.names}.isdisjoint(self._charged):
            may_repeat = False
        if not (may_repeat and is_enough and of.attempt < self._secure.attempts):
            of.fail()
            of.record.left_out = sorted(out)
            return self._send_home(of, out, now)
        of.begin_attempt(left, now + self._secure.stage_timeout)
        of.aside, of.record.left_out = {*out}, sorted(out)
        for client_id in (*left, *out):
            self._forget_masked(client_id, now)
        for client_id in out:
            self._put_aside(of, client_id)
        invitations = tuple(self._invitation(client_id, of.by) for client_id in left)
        return (*self._release_spent(spent, now), *invitations)

    def _release_spent(self, clients: Collection[ClientId], now: float) -> Effects:
        """Release members whose budget allows no further attempt."""
        spent = sorted(clients)
        for each in spent:
            self._forget_masked(each, now)
            if (of_sum := self.record.clients[each].sum) is not None:
                of_sum.left = "its privacy budget allows no further attempt"
            self._set_fate(each, Fate.STRAGGLER, now)
        return tuple(Release(each, self.record.round_id, ReleaseReason.ROUND_CLOSED) for each in spent)

    def _put_aside(self, of: OneSum, client_id: ClientId) -> None:
        """Record why a client is not in this attempt."""
        row = self.record.clients[client_id].sum
        refusals = [each for each in of.record.refusals if client_id in each.of]
        by = sorted({each.by for each in refusals})
        if row is not None and not row.left:
            why = f"refused by {', '.join(by)}: {refusals[0].detail}" if by else "it refuses other members"
            row.left = f"{_REFUSED}: {why}"

    def _send_home(self, of: OneSum, clients: Collection[ClientId], now: float) -> Effects:
        """Continue without clients that were left out for refusals: no further attempt is with them."""
        gone = sorted(clients)
        of.aside -= {*gone}
        for client_id in gone:
            row = self.record.clients[client_id]
            self._put_aside(of, client_id)
            detail = row.sum.left.partition(": ")[2] if row.sum is not None else ""
            if row.fate is Fate.JOINED:  # not if its masked update is in, for nothing
                self._set_fate(client_id, Fate.FAILED, now, _REFUSED, detail)
            self._note_trouble(client_id, _REFUSED, detail, now)
        return tuple(Release(client_id, self.record.round_id, ReleaseReason.ROUND_CLOSED) for client_id in gone)

    def _note_trouble(self, client_id: ClientId, reason: FailureReason, detail: str, now: float) -> None:
        """Note why a client is in no sum, and let it rest if it needs a repair."""
        self.membership.noted(client_id, reason, detail, now)
        if reason in TROUBLES:
            let_rest(self.membership, self.policy, self._seed, client_id, now)

    def _forget_masked(self, client_id: ClientId, now: float) -> None:
        """Forget the masked update of an attempt that has failed: nothing can open it."""
        row = self.record.clients[client_id]
        if self._reported.pop(client_id, None) is not None:
            row.digest, row.num_bytes, row.plain_bytes, row.upload_begun_at = None, 0, 0, None
            self._set_fate(client_id, Fate.JOINED, now)
        if row.sum is not None:
            row.sum = MemberRecord(row.sum.session, self._sum_of(client_id).attempt)

    # ------------------------------------------------------------ the end

    def _close(self, reason: CloseReason, now: float) -> Effects:
        record = self.record
        in_time = reason in (CloseReason.ENOUGH, CloseReason.LINGER_OVER)
        releases = self._release(Fate.RELEASED if in_time else Fate.STRAGGLER, ReleaseReason.ROUND_CLOSED, now)
        record.phase, record.closed_at, record.close_reason = Phase.SECURING, now, reason
        begun = (effect for each in self._sums for effect in self._begin(each, now))
        return (*releases, *begun, *self._conclude(now))

    def _conclude(self, now: float) -> Effects:
        """Aggregate the sums that have opened, or abandon the round, once every session has ended."""
        if self.phase is not Phase.SECURING or any(self._running):
            return ()
        self._leave_unused(
            {e.record.session: e.record.detail for e in self._sums if not e.is_opened or e.record.is_dropped}
        )
        releases = self._release_joined(Fate.STRAGGLER, ReleaseReason.ROUND_CLOSED, now)
        if len(self._reported) < self.record.quorum:
            return (*releases, *self._abandon(AbandonReason.SECURE_FAILED, now, self._why_failed()))
        self.record.phase = Phase.AGGREGATING
        return (*releases, *self._audited_charge(), self._aggregate())

    def _why_failed(self) -> str:
        ended = (each for each in self.record.sums if each.stage == Stage.FAILED or each.is_dropped)
        reasons = "; ".join(f"session {each.session}, {each.detail}" for each in ended)
        counts = f"{len(self._reported)} in opened sums, quorum {self.record.quorum}"
        return f"{counts}; {reasons}" if reasons else counts

    def _leave_unused(self, sums: Mapping[int, str]) -> None:
        """Record why masked updates count in no version: these sums have no result, or the update is in none."""
        for client_id in [*self._reported]:
            of = self._sum_of(client_id)
            if of.record.session in sums:
                why = f"its session has no sum: {sums[of.record.session]}"
            elif client_id not in of.survivors:
                why = "the survivors of its session were told before it came"
            else:
                continue
            del self._reported[client_id]
            self.record.clients[client_id].unused_because = why

    def _aggregate(self) -> Aggregate:
        record, opened = self.record, [each for each in self._sums if each.is_opened and not each.record.is_dropped]
        contributions = tuple(Contribution(c, u.digest, u.num_examples, 1.0) for c, u in sorted(self._reported.items()))
        sums = tuple(each.summed() for each in opened)
        return Aggregate(record.round_id, record.base_version, contributions, sums=sums, ranges=self._ranges)

    def aggregated(self, event: Aggregated, now: float) -> Effects:
        """Commit the round without the sums that were dropped; abandon it if too few members are left."""
        self._drop(event.dropped, now)
        if len(self._reported) < self.record.quorum:
            return self._abandon(AbandonReason.SECURE_FAILED, now, self._why_failed())
        self.record.ranges = [*event.ranges]
        return super().aggregated(event, now)

    def aggregation_failed(self, event: AggregationFailed, now: float) -> Effects:
        """Abandon the round: the fold has failed, or no sum counts."""
        if not event.dropped:
            return super().aggregation_failed(event, now)
        self._drop(event.dropped, now)
        return self._abandon(AbandonReason.SECURE_FAILED, now, self._why_failed())

    def _drop(self, dropped: Mapping[int, str], now: float) -> None:
        """Record the sums that the fold has dropped, and count them for their members."""
        for session, why in dropped.items():
            record = self.record.sums[session]
            record.is_dropped, record.detail = True, why
        self._count_dropped(dropped, now)
        self._leave_unused(dropped)

    def _count_dropped(self, dropped: Container[int], now: float) -> None:
        """Let clients rest that were only in sums that no honest members make, for `DROPPED_MAX` rounds in a row.

        They are named, and rest for `REST_ROUNDS` rounds like this one, twice as long at each further time: an honest
        client that was unlucky is soon in a sum that counts, without those that rest.
        """
        for each in self._sums:
            if not each.is_opened or each.record.session in self._lost_sums:
                continue
            for client_id in each.survivors:
                is_dropped = each.record.session in dropped
                if not is_dropped:
                    learn(self.membership, self._reported[client_id])
                times = self.membership.summed(client_id, is_dropped=is_dropped)
                if times < DROPPED_MAX:
                    continue
                self.record.only_dropped[client_id] = times
                why = f"the secure sums with its updates were dropped in {count_of(times, 'round')} in a row"
                self.membership.noted(client_id, DROPPED_SUMS, why, now)
                rounds = REST_ROUNDS * 2 ** min(times - DROPPED_MAX, DOUBLINGS_MAX)
                self.membership.failed(client_id, now + rounds * (now - self.record.opened_at))

    def _released_by(self, reason: AbandonReason, now: float) -> Effects:
        why = ReleaseReason.RUN_ENDED if reason is AbandonReason.STOP_REQUESTED else ReleaseReason.ROUND_ABANDONED
        return (*super()._released_by(reason, now), *self._release_joined(Fate.STRAGGLER, why, now))

    def _release_joined(self, fate: Fate, reason: ReleaseReason, now: float) -> Effects:
        """Release the members whose masked updates have not come."""
        joined = [client_id for client_id, _ in self.record.with_fate(Fate.JOINED)]
        for client_id in joined:
            self._set_fate(client_id, fate, now)
        return tuple(Release(client_id, self.record.round_id, reason) for client_id in joined)

    def _let_go(self, digests: Container[Digest]) -> int:
        lost = [client_id for client_id, update in self._reported.items() if update.digest in digests]
        for client_id in lost:
            of = self._sum_of(client_id)
            if not of.is_opened or client_id in of.survivors:
                self._lost_sums.add(of.record.session)
        for client_id in lost:
            del self._reported[client_id]
        if self.phase is Phase.AGGREGATING:
            self._drop_lost()
            self._leave_unused(dict.fromkeys(self._lost_sums, _LOST))
        return len(self._reported)

    def _drop_lost(self) -> None:
        """Drop the opened sums of which an update's file is lost: what opens them opens no smaller sum."""
        for session in self._lost_sums:
            record = self._sums[session].record
            record.is_dropped, record.detail = True, _LOST

    def _settled_without(self, now: float) -> Effects:
        if self.phase is not Phase.SECURING:
            return super()._settled_without(now)
        effects: Effects = ()
        for each in [each for each in self._running if each.record.session in self._lost_sums]:
            may_repeat = each.session is None or each.session.stage in (Stage.SHARING, Stage.MASKING)
            effects += self._fails(each, _LOST, may_repeat=may_repeat, now=now)
        self._lost_sums = {session for session in self._lost_sums if self._sums[session].is_opened}
        self._drop_lost()
        return (*effects, *self._conclude(now))


def _content(event: KeysCame | MemberAnswered) -> MemberKeys | Answer:
    """Return the message of an event, whose form was checked before the event."""
    message = wire.answer_from(bytes.fromhex(event.content))
    assert not isinstance(message, Gone | MaskedWords)
    return message

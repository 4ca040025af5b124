"""One of the secure sums of a round or of an evaluation, at its newest attempt. Pure."""

import math
from collections.abc import Collection, Sequence

from atoll.protocol.secure.messages import MemberKeys, Position, Roster
from atoll.protocol.vocabulary import ClientId, Purpose, RoundId
from atoll.server.rounds.record import SumRecord
from atoll.server.rounds.session_events import OpeningFailed, SessionSum, SumOpened, TellMember
from atoll.server.sessions.refusals import left_out
from atoll.server.sessions.session import Effect, OpenSum, Session, Stage, Tell


class OneSum:
    """A secure sum: the keys of its newest attempt, and from the roster on its session."""

    def __init__(self, number: int) -> None:
        self.record = SumRecord(number)
        self.keys: dict[ClientId, MemberKeys] = {}
        self.asked: set[ClientId] = set()  # members whose keys are awaited, from the second attempt on
        self.aside: set[ClientId] = set()  # in no session now, for refusals; another attempt may be with them
        self.session: Session | None = None
        self.by = math.inf  # the time at which the stage ends
        self.opening: OpenSum | None = None  # issued, and not yet answered
        self.is_over = self.is_opened = False

    @property
    def attempt(self) -> int:
        """The number of the newest attempt."""
        return self.record.attempt

    @property
    def names(self) -> list[ClientId]:
        """The members by position."""
        return sorted(self.keys)

    def position_of(self, client_id: ClientId) -> Position | None:
        """Return a client's position in the roster; None: it is no member, or there is no roster."""
        if self.session is None or client_id not in self.keys:
            return None
        return self.names.index(client_id)

    @property
    def survivors(self) -> list[ClientId]:
        """The members whose updates are in the sum, sorted."""
        if self.session is None:
            return []
        names = self.names
        return [names[position] for position in sorted(self.session.survivors)]

    @property
    def may_refuse(self) -> bool:
        """Whether a member that refuses others may be in another attempt: no survivors have been told."""
        return self.session is not None and self.session.stage in (Stage.SHARING, Stage.MASKING)

    def begin(self, threshold: int, least: int, by: float) -> Sequence[Effect]:
        """Begin the session of the members whose keys are in, of whom at least `least` are in its sum."""
        roster = Roster(threshold, tuple(self.keys[name] for name in self.names))
        self.session = Session(roster, roster.members[0].terms, least)
        self.record.threshold, self.record.num_members = threshold, len(self.keys)
        self.record.stage, self.by = self.session.stage, by
        return self.session.start()

    def begin_attempt(self, members: Collection[ClientId], by: float) -> None:
        """Begin another attempt, with new keys of these members."""
        self.record.attempt += 1
        self.record.stage, self.record.threshold, self.record.num_members = "keys", 0, 0
        self.session, self.opening, self.keys, self.asked = None, None, {}, {*members}
        self.by = by

    def fail(self) -> None:
        """End without a sum."""
        self.is_over, self.record.stage, self.by = True, Stage.FAILED, math.inf

    def awaits(self, event: SumOpened | OpeningFailed) -> bool:
        """Return whether an event is the outcome of the opening that was issued."""
        return not self.is_over and self.attempt == event.attempt and self.opening is not None

    def opened(self, event: SumOpened) -> None:
        """End with an open sum; its event may have a fault, for which it does not count."""
        names = self.names
        assert self.session is not None
        self.session.opened(names.index(client_id) for client_id in event.wrong)
        self.record.wrong, self.record.stage, self.by = [*event.wrong], Stage.OPENED, math.inf
        self.is_over, self.is_opened = True, not event.fault

    def told(self, tell: Tell, round_id: RoundId, purpose: Purpose = "update") -> TellMember:
        """Return the question to a member as an effect of its round."""
        at = (self.names[tell.position], round_id, self.record.session, self.attempt, len(self.keys))
        return TellMember(*at, tell.question, purpose)

    def without(self, members: Collection[ClientId]) -> frozenset[ClientId]:
        """Return which of these members another attempt leaves out: no two of the others refuse each other."""
        refusals = ((each.by, name) for each in self.record.refusals for name in each.of)
        return frozenset(ClientId(name) for name in left_out(refusals, members))

    def repeated(self, keys: MemberKeys) -> str | None:
        """Return why keys cannot be in a roster with the others: each member would refuse it; None: they can."""
        for other in self.keys.values():
            for name in ("mask_key", "box_key"):
                if getattr(keys, name) == getattr(other, name):
                    return f"its {name.replace('_', ' ')} is that of {other.name}"
            if keys.site.key == other.site.key:
                return f"its site key is that of {other.name}: one site would count twice"
        return None

    def summed(self) -> SessionSum:
        """Return what opens the sum."""
        session = self.session
        assert session is not None
        return SessionSum(
            self.record.session,
            self.attempt,
            session.id,
            session.roster,
            session.masking,
            session.survivors,
            dict(session.reveals),
        )

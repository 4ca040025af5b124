"""One of the secure sums of a round or of an evaluation, at its newest attempt. Pure."""

import math

from atoll.protocol.secure.messages import MemberKeys, Position
from atoll.protocol.vocabulary import ClientId
from atoll.server.rounds.record import SumRecord
from atoll.server.rounds.session_events import SessionSum
from atoll.server.sessions.session import OpenSum, Session


class OneSum:
    """A secure sum: the keys of its newest attempt, and from the roster on its session."""

    def __init__(self, number: int) -> None:
        self.record = SumRecord(number)
        self.keys: dict[ClientId, MemberKeys] = {}
        self.asked: set[ClientId] = set()  # members whose keys are awaited, from the second attempt on
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

"""Events and effects of a round with secure sums, between it and the members of its sessions. Pure values.

They are events and effects of a run like all others (`events.py`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import ClientId, FailureReason, RoundId

if TYPE_CHECKING:
    from atoll.protocol.secure.messages import Position, Question, Roster


@value
class KeysCame:
    """The arrival of a client's keys for its session, which the driver has checked: its update is encoded.

    In these four events `content` is the message's canonical wire form, as hexadecimal digits; empty: it was deleted
    after its round.
    """

    client_id: ClientId
    round_id: RoundId
    session: int
    attempt: int
    content: str


@value
class SharesCame:
    """The arrival of a member's sealed shares."""

    client_id: ClientId
    round_id: RoundId
    session: int
    attempt: int
    content: str


@value
class SurvivorsSigned:
    """The arrival of a member's signature of the survivors."""

    client_id: ClientId
    round_id: RoundId
    session: int
    attempt: int
    content: str


@value
class SharesRevealed:
    """The arrival of a member's shares that open the sum."""

    client_id: ClientId
    round_id: RoundId
    session: int
    attempt: int
    content: str


MemberAnswered = SharesCame | SurvivorsSigned | SharesRevealed


@value
class SessionLeft:
    """The end of a session for a client: it has left, or its message was refused.

    `refused`: the members whose keys or boxes it refuses; without them it may join another attempt.
    """

    client_id: ClientId
    round_id: RoundId
    session: int
    attempt: int
    reason: FailureReason
    detail: str = ""
    refused: tuple[ClientId, ...] = ()


@value
class SumOpened:
    """The answer to OpenSum: the reveals open the sum; `wrong` are the members that have revealed a wrong share."""

    round_id: RoundId
    session: int
    attempt: int
    wrong: tuple[ClientId, ...] = ()


@value
class OpeningFailed:
    """The answer to OpenSum: too few of the reveals are right."""

    round_id: RoundId
    session: int
    attempt: int
    detail: str = ""


SessionEvent = KeysCame | MemberAnswered | SessionLeft | SumOpened | OpeningFailed


# ---------------------------------------------------------------- effects


@value
class SumPlace:
    """Place of a client's update in a round with secure sums.

    Attributes:
        session: number of the sum.
        attempt: at it.
        ranges: exponents of the float tensors' ranges; empty: all 0.
    """

    session: int
    attempt: int
    ranges: tuple[int, ...] = ()


@value
class TellMember:
    """Send a question to a member of a session. Repeated when it reconnects."""

    client_id: ClientId
    round_id: RoundId
    session: int
    attempt: int
    members: int
    question: "Question"


@value
class SessionSum:
    """What opens the sum of a session.

    Attributes:
        session: number of the sum.
        attempt: at it.
        id: of the session.
        roster: keys of its members, sorted by name.
        masking: the members that have masked.
        survivors: those of them whose updates are in the sum.
        reveals: of at least `roster.threshold` members.
    """

    session: int
    attempt: int
    id: bytes
    roster: "Roster"
    masking: "frozenset[Position]"
    survivors: "frozenset[Position]"
    reveals: "Mapping[Position, tuple[int, ...]]"

    @property
    def members(self) -> tuple[ClientId, ...]:
        """The clients whose updates are in the sum, sorted."""
        return tuple(ClientId(self.roster.members[position].name) for position in sorted(self.survivors))


@value
class OpenSum:
    """Open the sum of a session, and check what its members have revealed."""

    round_id: RoundId
    sum: SessionSum


SessionEffect = TellMember | OpenSum

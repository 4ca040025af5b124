"""Events and effects of secure sums, between a round or an evaluation and the members of its sessions. Pure values.

They are events and effects of a run like all others (`events.py`). Of an evaluation, `round_id` is the number of the
evaluated version.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import ClientId, FailureReason, Purpose, RoundId

if TYPE_CHECKING:
    from atoll.protocol.secure.messages import Position, Question, Roster


@value
class MemberMessage:
    """The arrival of a member's message, which the driver has checked."""

    client_id: ClientId
    round_id: RoundId
    session: int
    attempt: int
    content: str
    purpose: Purpose = "update"


@value
class KeysCame(MemberMessage):
    """The arrival of a client's keys for its session, which the driver has checked: its update is encoded.

    In these five events `content` is the message's canonical wire form, as hexadecimal digits; empty: it was deleted
    after its round.
    """


@value
class SharesCame(MemberMessage):
    """The arrival of a member's sealed shares."""


@value
class MaskedCame(MemberMessage):
    """The arrival of what a member adds to the sum of an evaluation, masked."""

    purpose: Purpose = "evaluation"


@value
class SurvivorsSigned(MemberMessage):
    """The arrival of a member's signature of the survivors."""


@value
class SharesRevealed(MemberMessage):
    """The arrival of a member's shares that open the sum."""


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
    purpose: Purpose = "update"


OfMember = KeysCame | MaskedCame | MemberAnswered | SessionLeft


@value
class SumOpened:
    """The answer to OpenSum: the reveals open the sum.

    Attributes:
        wrong: the members that have revealed a wrong share.
        statistics: of an evaluation, the sums of its metrics over the survivors.
        fault: of an evaluation, why the opened words are no sum of the survivors; empty: they are.
    """

    round_id: RoundId
    session: int
    attempt: int
    wrong: tuple[ClientId, ...] = ()
    purpose: Purpose = "update"
    statistics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    fault: str = ""


@value
class OpeningFailed:
    """The answer to OpenSum: too few of the reveals are right."""

    round_id: RoundId
    session: int
    attempt: int
    detail: str = ""
    purpose: Purpose = "update"


SessionEvent = OfMember | SumOpened | OpeningFailed


# ---------------------------------------------------------------- effects


@value
class SumPlace:
    """Place of what a client adds in the secure sums of a round or an evaluation.

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
    purpose: Purpose = "update"


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
    """Open the sum of a session, and check what its members have revealed.

    Attributes:
        words: of an evaluation, the masked words of each survivor.
    """

    round_id: RoundId
    sum: SessionSum
    purpose: Purpose = "update"
    words: tuple[bytes, ...] = ()


SessionEffect = TellMember | OpenSum

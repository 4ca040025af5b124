"""One session of a secure sum at the coordinator: what members have sent, in, messages to members, out. Pure.

    SHARING   a SealedShares of each member, for the others
    MASKING   the masked update of each member that has shared (U2)
    AGREEING  the signature of each member whose masked update is in (U3): t of them let it open
    OPENING   the shares of t members
    OPENED, or FAILED

A stage ends when no member that may still answer is missing, or when it is due; agreeing and opening end with the t-th
answer. Fewer than t members end the session: before AGREEING another attempt may add the same encoded updates, after it
none may. A member whose message is wrong has left, with the reason; nothing that a member sends raises.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum

from atoll.ground.printable import count_of
from atoll.protocol.secure.messages import (
    Agreement,
    Answer,
    Boxes,
    Opening,
    Position,
    Question,
    Reveal,
    Roster,
    SealedShares,
    Survivors,
    is_sealed,
    survivors_statement,
)
from atoll.protocol.secure.shamir import PRIME
from atoll.protocol.secure.site_key import is_signed
from atoll.protocol.secure.transcript import session_id
from atoll.protocol.value_type import value


class Stage(StrEnum):
    """The stage of a session; the last two are final."""

    SHARING = "sharing"
    MASKING = "masking"
    AGREEING = "agreeing"
    OPENING = "opening"
    OPENED = "opened"
    FAILED = "failed"


@value
class Tell:
    """Send a question to a member."""

    position: Position
    question: Question


@value
class OpenSum:
    """Compute the streams of the sum from these reveals, check them, and report the outcome."""

    reveals: tuple[tuple[Position, tuple[int, ...]], ...]


@value
class Fail:
    """End the session without a sum; `may_repeat`: another attempt may add the same encoded updates."""

    reason: str
    may_repeat: bool


Effect = Tell | OpenSum | Fail


class Session:
    """A session among the members of a roster.

    Args:
        roster: keys of all members, sorted by name; each signature is checked.
        terms: digest of the terms.
        least: fewest members of a sum; at least the roster's threshold.
    """

    def __init__(self, roster: Roster, terms: bytes, least: int = 0) -> None:
        self.roster, self.stage = roster, Stage.SHARING
        self.id = session_id(terms, roster.threshold, [(each.statement(), each.signature) for each in roster.members])
        self._least = max(least, roster.threshold)
        self._shares: dict[Position, SealedShares] = {}
        self._masked: set[Position] = set()
        self._agreed: dict[Position, bytes] = {}
        self.reveals: dict[Position, tuple[int, ...]] = {}
        self.gone: dict[Position, str] = {}
        self.masking: frozenset[Position] = frozenset()
        self.survivors: frozenset[Position] = frozenset()
        self._opened_with = 0
        self._is_opening = False  # an opening has begun, and its outcome is not known

    # ------------------------------------------------------------ events

    def start(self) -> list[Effect]:
        """Send the roster to every member."""
        return self._tell(range(self.size), lambda _: self.roster)

    def answered(self, position: Position, answer: Answer) -> list[Effect]:
        """Take a member's answer; a repeated one counts once, a wrong one is the member's end."""
        if position in self.gone or self.is_over:
            return []
        match answer:
            case SealedShares():
                return self._on_shares(position, answer)
            case Agreement():
                return self._on_agreement(position, answer)
            case Reveal():
                return self._on_reveal(position, answer)

    def masked(self, position: Position) -> list[Effect]:
        """Count the masked update of a member; one that comes after the survivors are told is never opened."""
        if self.stage is not Stage.MASKING or position not in self.masking or position in self.gone:
            return []
        self._masked.add(position)
        return self._end_when_complete()

    def left(self, position: Position, reason: str) -> list[Effect]:
        """Note that a member has left. Its masked update, if it is in, still counts."""
        if position in self.gone or self.is_over:
            return []
        self.gone[position] = reason
        return self._end_when_complete()

    def due(self) -> list[Effect]:
        """End the stage with those that have answered."""
        return [] if self.is_over or self._is_opening else self._end_stage()

    def returned(self, position: Position) -> list[Effect]:
        """Repeat the newest question to a member that has connected again."""
        if position in self.gone or (question := self._question(position)) is None:
            return []
        return [Tell(position, question)]

    def opened(self, wrong: Iterable[Position] = ()) -> None:
        """Note that the sum is open, and which members had revealed wrong shares."""
        self.stage, self._is_opening = Stage.OPENED, False
        for position in wrong:
            self.gone.setdefault(position, "its reveal has a wrong share")

    def refused(self) -> list[Effect]:
        """Note that no `threshold` of the reveals open the sum: another one is needed, until the stage is due."""
        self._is_opening = False
        return self._end_when_complete()

    # ------------------------------------------------------------ state

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.roster.members)

    @property
    def is_over(self) -> bool:
        """Whether the session has ended."""
        return self.stage in (Stage.OPENED, Stage.FAILED)

    def missing(self) -> frozenset[Position]:
        """Return the members that may still answer in this stage, and have not."""
        wanted, have = {
            Stage.SHARING: (range(self.size), self._shares),
            Stage.MASKING: (self.masking, self._masked),
            Stage.AGREEING: (self.survivors, self._agreed),
            Stage.OPENING: (self.survivors, self.reveals),
        }.get(self.stage, ((), ()))
        return frozenset(wanted) - {*have} - {*self.gone}

    # ------------------------------------------------------------ answers

    def _on_shares(self, position: Position, answer: SealedShares) -> list[Effect]:
        if self.stage is not Stage.SHARING or position in self._shares:
            return []
        if not is_sealed(answer.boxes, {*range(self.size)} - {position}):
            return self.left(position, "its boxes are not one of the right size for each other member")
        self._shares[position] = answer
        return self._end_when_complete()

    def _on_agreement(self, position: Position, answer: Agreement) -> list[Effect]:
        if self.stage not in (Stage.AGREEING, Stage.OPENING) or position not in self.survivors:
            return []
        if position in self._agreed:
            return []
        statement = survivors_statement(self.id, self.survivors, self.size)
        if not is_signed(self.roster.members[position].site.key, statement, answer.signature):
            return self.left(position, "its agreement is not its signature of the survivors")
        self._agreed[position] = answer.signature
        if self.stage is Stage.OPENING:
            return self._tell([position], self._question)
        return self._end_when_complete()

    def _on_reveal(self, position: Position, answer: Reveal) -> list[Effect]:
        if self.stage is not Stage.OPENING or position not in self._agreed or position in self.reveals:
            return []
        if len(answer.shares) != len(self.masking) or not all(0 <= share < PRIME for share in answer.shares):
            return self.left(position, f"its reveal is not {count_of(len(self.masking), 'share')}")
        self.reveals[position] = answer.shares
        return self._end_when_complete()

    # ------------------------------------------------------------ stages

    def _end_when_complete(self) -> list[Effect]:
        if self._is_opening:
            return []  # whoever answers or leaves meanwhile: the outcome decides
        is_enough = {
            Stage.AGREEING: len(self._agreed) >= self.roster.threshold,
            Stage.OPENING: len(self.reveals) >= max(self.roster.threshold, self._opened_with + 1),
        }.get(self.stage, False)
        return self._end_stage() if is_enough or not self.missing() else []

    def _end_stage(self) -> list[Effect]:
        match self.stage:
            case Stage.SHARING:
                return self._begin_masking()
            case Stage.MASKING:
                return self._begin_agreeing()
            case Stage.AGREEING:
                return self._begin_opening()
            case _:
                return self._open()

    def _begin_masking(self) -> list[Effect]:
        self.masking = frozenset(self._shares) - {*self.gone}
        if len(self.masking) < self._least:
            return self._fail("shares", len(self.masking), may_repeat=True)
        self.stage = Stage.MASKING
        return self._tell(self.masking, self._question)

    def _begin_agreeing(self) -> list[Effect]:
        if len(self._masked) < self._least:
            return self._fail("masked updates", len(self._masked), may_repeat=True)
        self.survivors, self.stage = frozenset(self._masked), Stage.AGREEING
        if not self.missing():
            return self._fail("agreements", 0, may_repeat=False)
        return self._tell(self.survivors, self._question)

    def _begin_opening(self) -> list[Effect]:
        if len(self._agreed) < self.roster.threshold:
            return self._fail("agreements", len(self._agreed), may_repeat=False)
        self.stage = Stage.OPENING
        first = sorted(self._agreed)[: self.roster.threshold]
        self._opening = Opening({position: self._agreed[position] for position in first})  # the same for all, always
        return self._tell(self._agreed, self._question)

    def _open(self) -> list[Effect]:
        if len(self.reveals) < max(self.roster.threshold, self._opened_with + 1):
            return self._fail("reveals that open it", len(self.reveals), may_repeat=False)
        self._opened_with, self._is_opening = len(self.reveals), True
        return [OpenSum(tuple(sorted(self.reveals.items())))]

    def _fail(self, of: str, have: int, *, may_repeat: bool) -> list[Effect]:
        stage, self.stage = self.stage, Stage.FAILED
        need = self.roster.threshold if stage in (Stage.AGREEING, Stage.OPENING) else self._least
        return [Fail(f"{stage}: {have} of {self.size} members have sent {of}; needed: {need}", may_repeat)]

    # ------------------------------------------------------------ questions

    def _tell(self, positions: Iterable[Position], question: Callable[[Position], Question | None]) -> list[Effect]:
        told = ((position, question(position)) for position in sorted(positions) if position not in self.gone)
        return [Tell(position, found) for position, found in told if found is not None]

    def _question(self, position: Position) -> Question | None:
        """Return the newest question of a member; None: it is asked nothing now."""
        match self.stage:
            case Stage.SHARING:
                return self.roster
            case Stage.MASKING if position in self.masking:
                senders = sorted(self.masking - {position})
                return Boxes({sender: self._shares[sender].boxes[position] for sender in senders})
            case Stage.OPENING if position in self._agreed:
                return self._opening
            case Stage.AGREEING | Stage.OPENING if position in self.survivors:
                return Survivors(self.survivors)
        return None

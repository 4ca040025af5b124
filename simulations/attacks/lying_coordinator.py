"""A coordinator that lies to the members of its secure sums: one lie in each attempt at a sum, to one member.

The sums are those of the deployed machine; a lie replaces a question on its way to its victim, which has all checks of
a deployed site. The move and the victim depend on (seed, round, session, attempt).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from atoll.protocol.secure.messages import (
    Agreement,
    Boxes,
    Gone,
    MemberKeys,
    Opening,
    Position,
    Question,
    Roster,
    Survivors,
)
from atoll.protocol.secure.wire import SessionName
from atoll.protocol.vocabulary import ClientId, FailureReason, RoundId
from atoll.server.rounds.session_events import TellMember

Key = tuple[int, int, int]
"""Round, session and attempt."""

ANSWERED = "answered"


class _Place(NamedTuple):
    """Where a lie is told: the victim, another member, and the roster of their session."""

    victim: Position
    other: Position
    roster: Roster


def _with_keys(roster: Roster, place: Position, keys: MemberKeys) -> Roster:
    return replace(roster, members=(*roster.members[:place], keys, *roster.members[place + 1 :]))


def _forged_key(question: Any, at: _Place) -> Question:
    key = X25519PrivateKey.generate().public_key().public_bytes_raw()
    return _with_keys(question, at.other, replace(question.members[at.other], mask_key=key))


def _forged_site(question: Any, at: _Place) -> Question:
    made = Ed25519PrivateKey.generate()
    keys = question.members[at.other]
    forged = replace(keys, site=replace(keys.site, key=made.public_key().public_bytes_raw()))
    return _with_keys(question, at.other, replace(forged, signature=made.sign(forged.statement())))


def _other_terms(question: Any, at: _Place) -> Question:
    return _with_keys(question, at.other, replace(question.members[at.other], terms=bytes(32)))


def _changed_box(question: Any, at: _Place) -> Question:
    place = min(question.boxes)
    box = question.boxes[place]
    return Boxes({**question.boxes, place: bytes([box[0] ^ 1]) + box[1:]})


def _few_boxes(question: Any, at: _Place) -> Question:
    return Boxes({place: question.boxes[place] for place in sorted(question.boxes)[: at.roster.threshold - 2]})


def _few_survivors(question: Any, at: _Place) -> Question:
    others = sorted(question.positions - {at.victim})
    return Survivors(frozenset({at.victim, *others[: at.roster.threshold - 2]}))


def _few_signatures(question: Any, at: _Place) -> Question:
    return Opening(dict(sorted(question.signatures.items())[: at.roster.threshold - 1]))


def _forged_signature(question: Any, at: _Place) -> Question:
    return Opening({**question.signatures, min(question.signatures): Ed25519PrivateKey.generate().sign(b"survivors")})


Move = tuple[type[Question], Callable[[Any, _Place], Question]]

MOVES: dict[str, Move] = {
    "forged_key": (Roster, _forged_key),
    "forged_site": (Roster, _forged_site),
    "other_terms": (Roster, _other_terms),
    "low_threshold": (Roster, lambda question, at: replace(question, threshold=question.threshold - 1)),
    "changed_box": (Boxes, _changed_box),
    "few_boxes": (Boxes, _few_boxes),
    "few_survivors": (Survivors, _few_survivors),
    "without_the_site": (Survivors, lambda question, at: Survivors(question.positions - {at.victim})),
    "second_survivors": (Survivors, _few_survivors),
    "few_signatures": (Opening, _few_signatures),
    "forged_signature": (Opening, _forged_signature),
}
"""Lies by name: the question that is changed, and how. "second_survivors" are told after the victim has signed."""

AFTERWARDS = "second_survivors"


@dataclass(slots=True)
class Lie:
    """A lie, and what became of it."""

    move: str
    place: _Place
    client: ClientId
    question: Question | None = None
    """What the victim is asked; None: its question is not due yet."""
    is_told: bool = False
    outcome: str = ""
    """The victim's reason to leave, or `ANSWERED`; empty: it has not answered."""

    @property
    def is_refused(self) -> bool:
        """Whether the victim has left for it, and not because its agent was restarted."""
        return self.outcome not in ("", ANSWERED) and not self.outcome.startswith(FailureReason.SESSION_LOST)

    def line(self, key: Key) -> dict[str, Any]:
        """Return the lie for the line of its round."""
        where = {"session": key[1], "attempt": key[2], "move": self.move, "to": str(self.client)}
        return {**where, "refused": self.is_refused, "outcome": self.outcome or "no answer"}


class LyingCoordinator:
    """Lies of one run's coordinator.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lies: dict[Key, Lie] = {}

    def told(self, effect: TellMember) -> TellMember:
        """Return what a member is asked in place of a question; a repeated question gets the same lie."""
        key = (int(effect.round_id), effect.session, effect.attempt)
        if effect.purpose != "update":
            return effect
        if isinstance(effect.question, Roster) and key not in self._lies:
            self._lies[key] = self._drawn(key, effect.question)
        lie = self._lies.get(key)
        if lie is None or lie.client != effect.client_id:
            return effect
        kind, change = MOVES[lie.move]
        if not isinstance(effect.question, kind):
            return effect
        if lie.question is None:
            lie.question = change(effect.question, lie.place)
        if lie.move == AFTERWARDS:
            return effect
        lie.is_told = True
        return replace(effect, question=lie.question)

    def heard(self, client_id: ClientId, of: SessionName, message: object) -> TellMember | None:
        """Note a member's answer to a lie; return another question that follows on it, or None."""
        lie = self._lies.get((int(of.round), of.session, of.attempt))
        if of.purpose != "update" or lie is None or lie.client != client_id or lie.question is None or lie.outcome:
            return None
        if lie.move == AFTERWARDS and not lie.is_told:
            if not isinstance(message, Agreement):
                return None
            lie.is_told = True
            return TellMember(client_id, of.round, of.session, of.attempt, len(lie.place.roster.members), lie.question)
        if isinstance(message, Gone):
            lie.outcome = message.reason
        elif not isinstance(message, MemberKeys):  # which a member repeats when it connects again
            lie.outcome = ANSWERED
        return None

    def take(self, round_id: RoundId) -> dict[str, Any]:
        """Return the lies that were told in a round, for its line, and forget them."""
        ended = {key: self._lies.pop(key) for key in sorted(self._lies) if key[0] <= round_id}
        told = {key: lie for key, lie in ended.items() if lie.is_told and key[0] == round_id}
        refused = sum(lie.is_refused for lie in told.values())
        return {"told": len(told), "refused": refused, "lies": [lie.line(key) for key, lie in told.items()]}

    def _drawn(self, key: Key, roster: Roster) -> Lie:
        draw = random.Random(f"atoll lies {self._seed} {key}")
        victim, other = draw.sample(range(len(roster.members)), 2)
        move = draw.choice(sorted(MOVES))
        return Lie(move, _Place(victim, other, roster), ClientId(roster.members[victim].name))

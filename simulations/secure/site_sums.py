"""The shell around a simulated site's members of sessions: questions in; promises, answers and masks out.

It is what `client/work/secure_sums.py` is to an agent. A member lives in memory alone: when its device falls asleep,
its encoded update and its promises stay, and its secrets are gone.
"""

from collections.abc import Callable, Iterable

from atoll.client.secure.member import Effect, KeepPromise, Mask, Member, Send, Stream
from atoll.client.session.agreed_terms import fault_of_terms
from atoll.client.session.events import Invitation, Key
from atoll.protocol.secure.messages import Answer, Gone, MemberKeys, Question
from atoll.protocol.secure.terms import Terms
from atoll.protocol.secure.wire import SessionName
from atoll.protocol.vocabulary import FailureReason, RoundId, RunId
from atoll.simulations.secure.cryptography import Cryptography

RESTARTED = str(FailureReason.SESSION_LOST)
"""Reason to leave: the agent was restarted, and the secrets of its session were in memory."""

Say = Callable[[SessionName, MemberKeys | Answer | Gone], None]


class SiteSums:
    """Members of the sessions that a simulated site is in.

    Args:
        name: of the client.
        cryptography: of the run's sums.
        say: sends a message to the coordinator.
        mask: masks the encoded update of a round with an attempt's streams, and uploads it.
    """

    def __init__(
        self,
        name: str,
        cryptography: Cryptography,
        say: Say,
        mask: Callable[[Key, int, tuple[Stream, ...]], None],
    ) -> None:
        self._name, self._cryptography, self._say, self._mask = name, cryptography, say, mask
        self._members: dict[Key, Member] = {}

    def fault(self, terms: Terms) -> str:
        """Return why this site does not train for a sum under these terms; empty: it does."""
        return self._cryptography.promises(self._name).fault(terms)

    def join(self, invitation: Invitation) -> None:
        """Join a session with the encoded update, or repeat this member's first message."""
        terms, known = invitation.secure, self._members.get(invitation.key)
        assert terms is not None
        if known is not None and known.terms == terms:
            self._carry_out(invitation.key, known, known.start())
            return
        if fault := fault_of_terms(invitation, terms):
            self._refuse(terms, fault)
            return
        if known is not None and known.terms.attempt >= terms.attempt:
            self._refuse(terms, "another attempt of this round has begun here, under other terms")
            return
        self.forget(invitation.key)
        promises = self._cryptography.promises(self._name)
        if known is None and promises.attempt_of(terms.run, terms.purpose, terms.round) >= terms.attempt:
            self._say(_name(terms), Gone(RESTARTED))
            return
        member = self._members[invitation.key] = self._cryptography.member(self._name, terms)
        self._carry_out(invitation.key, member, member.start())

    def asked(self, of: SessionName, question: Question) -> None:
        """Hand a question of the coordinator to the member that it is for."""
        key = ("round", of.run, of.round)
        member = self._members.get(key)
        if member is None or _name(member.terms) != of:
            self._say(of, Gone(RESTARTED))
            return
        self._carry_out(key, member, member.ask(question))

    def terms_of(self, key: Key) -> Terms:
        """Return the terms of the session of a round that this site is in."""
        return self._members[key].terms

    def forget(self, key: Key) -> None:
        """Leave the session of a round."""
        if (member := self._members.pop(key, None)) is not None:
            member.leave("it is over")

    def crash(self) -> None:
        """Lose all members, with their secrets."""
        self._members.clear()

    def _carry_out(self, key: Key, member: Member, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case KeepPromise(promise):
                    self._cryptography.keep(self._name, promise)
                case Mask(streams, _):
                    self._mask(key, member.terms.attempt, streams)
                case Send(message):
                    self._say(_name(member.terms), message)

    def _refuse(self, terms: Terms, fault: str) -> None:
        self._say(_name(terms), Gone(f"{FailureReason.SESSION_REFUSED}: {fault}"))


def _name(terms: Terms) -> SessionName:
    return SessionName(RunId(terms.run), RoundId(terms.round), terms.attempt, terms.session)

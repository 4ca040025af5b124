"""The shell around a simulated site's members of sessions: questions in; promises, answers and masks out.

It is what `client/work/secure_sums.py` is to an agent. A member lives in memory alone, and so do the metrics of an
evaluation: when its device falls asleep, its encoded update and its promises stay, and its secrets are gone.
"""

from collections.abc import Callable, Iterable

from atoll.client.secure.member import Effect, KeepPromise, Mask, Member, Send, Stream
from atoll.client.session.agreed_terms import fault_of_terms
from atoll.client.session.events import Key, ModelRequest, Sums
from atoll.protocol.secure.messages import Answer, Gone, MaskedWords, MemberKeys, Question
from atoll.protocol.secure.terms import Terms
from atoll.protocol.secure.wire import SessionName
from atoll.protocol.vocabulary import FailureReason, RoundId, RunId
from atoll.simulations.secure.cryptography import Cryptography
from atoll.tensors.masked.metrics import encode_metrics, mask_metrics

RESTARTED = str(FailureReason.SESSION_LOST)
"""Reason to leave: the agent was restarted, and the secrets of its session were in memory."""

Said = MemberKeys | Answer | MaskedWords | Gone
"""A message of a member to the coordinator."""

Say = Callable[[SessionName, Said], None]

_KIND = {"update": "round", "evaluation": "version"}
"""The first part of the name of a request, by the purpose of its sum."""


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
        self._metrics: dict[Key, bytes] = {}  # encoded, of evaluations that are not over

    def fault(self, request: ModelRequest, terms: Terms) -> str:
        """Return why this site does not work for the sum of a request; empty: it does, or has done so."""
        return "" if request.key in self._metrics else self._cryptography.promises(self._name).fault(terms)

    def join(self, request: ModelRequest, sums: Sums | None = None) -> None:
        """Join a session with what is encoded, or repeat this member's first message.

        Args:
            request: with the terms of the sum.
            sums: metrics to encode, of an evaluation that has just ended.
        """
        key, terms, known = request.key, request.secure, self._members.get(request.key)
        assert terms is not None
        if known is not None and known.terms == terms:
            self._carry_out(key, known, known.start())
            return
        if fault := fault_of_terms(request, terms):
            self._refuse(terms, fault)
            return
        if sums is not None:
            self._metrics.setdefault(key, encode_metrics(sums, terms.metrics)[0])
        if known is not None and known.terms.attempt >= terms.attempt:
            self._refuse(terms, "another attempt of this round has begun here, under other terms")
            return
        self._leave(key)
        promises = self._cryptography.promises(self._name)
        if known is None and promises.attempt_of(terms.run, terms.purpose, terms.round) >= terms.attempt:
            self._say(_name(terms), Gone(RESTARTED))
            return
        member = self._members[key] = self._cryptography.member(self._name, terms)
        self._carry_out(key, member, member.start())

    def asked(self, of: SessionName, question: Question) -> None:
        """Hand a question of the coordinator to the member that it is for."""
        key = (_KIND[of.purpose], of.run, of.round)
        member = self._members.get(key)
        if member is None or _name(member.terms) != of:
            self._say(of, Gone(RESTARTED))
            return
        self._carry_out(key, member, member.ask(question))

    def terms_of(self, key: Key) -> Terms:
        """Return the terms of the session of a round that this site is in."""
        return self._members[key].terms

    def forget(self, key: Key) -> None:
        """Leave the session of a round or of an evaluation, and drop what it has measured."""
        self._metrics.pop(key, None)
        self._leave(key)

    def _leave(self, key: Key) -> None:
        if (member := self._members.pop(key, None)) is not None:
            member.leave("it is over")

    def crash(self) -> None:
        """Lose all members, with their secrets, and what was measured."""
        self._members.clear()
        self._metrics.clear()

    def _carry_out(self, key: Key, member: Member, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case KeepPromise(promise):
                    self._cryptography.keep(self._name, promise)
                case Mask(streams, _) if key in self._metrics:
                    words = mask_metrics(self._metrics[key], [(each.key, each.sign) for each in streams])
                    self._say(_name(member.terms), MaskedWords(words))
                case Mask(streams, _):
                    self._mask(key, member.terms.attempt, streams)
                case Send(message):
                    self._say(_name(member.terms), message)

    def _refuse(self, terms: Terms, fault: str) -> None:
        self._say(_name(terms), Gone(f"{FailureReason.SESSION_REFUSED}: {fault}"))


def _name(terms: Terms) -> SessionName:
    return SessionName(RunId(terms.run), RoundId(terms.round), terms.attempt, terms.session, terms.purpose)

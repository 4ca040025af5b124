"""Secure sums in simulated worlds: members at agents, openings at the coordinator, with the real keys and masks.

An agent's promises and its encoded updates survive its crash, its members do not. The coordinator's folds are compared
with the updates that were encoded, which it never sees.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.client.secure.member import Effect, KeepPromise, Mask, Member, Send
from atoll.client.session.events import Invitation, Key
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import Agreement, Gone, MemberKeys, Question, Reveal, SealedShares
from atoll.protocol.secure.terms import Terms
from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import ClientId, Digest, FailureReason, RoundId, RunId
from atoll.server.opening.streams import NotOpened, open_sum
from atoll.server.rounds.events import Aggregate, Event, Invite, Update
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.secure_round import SecureRound
from atoll.server.rounds.session_events import (
    KeysCame,
    OpeningFailed,
    OpenSum,
    SessionLeft,
    SharesCame,
    SharesRevealed,
    SumOpened,
    SurvivorsSigned,
    TellMember,
)
from atoll.tensors.secure.keystream import add_stream
from tests.histories.network import OfSum
from tests.histories.scheduling import Endpoint, World
from tests.server.sessions.small_federation import SIZE, Site, masked_in_parts, terms_of

RUN = RunId("run")
MASKING_S = 1.0
RESTARTED = str(FailureReason.SESSION_LOST)
Words = NDArray[np.uint32]


@value
class Told(OfSum):
    """A question of the coordinator to a member, on the control stream."""

    round_id: RoundId
    session: int
    attempt: int
    members: int
    question: Question


@value
class Said(OfSum):
    """A message of a member, on the control stream, as the event that it becomes."""

    event: KeysCame | SharesCame | SurvivorsSigned | SharesRevealed | SessionLeft


_KINDS = {SealedShares: SharesCame, Agreement: SurvivorsSigned, Reveal: SharesRevealed}


class Sums:
    """What all of a world's encoded and masked updates are, and the checks of its openings and folds."""

    def __init__(self, world: World, names: list[ClientId]) -> None:
        self.world = world
        self.sites = {name: Site(str(name)) for name in names}
        for site in self.sites.values():
            site.promises.base_repeats_max = world.scenario.base_repeats_max
            site.pinned.update({other.name: other.identity.key for other in self.sites.values()})
        self.encoded: dict[tuple[ClientId, RoundId], Words] = {}
        self.masked: dict[Digest, Words] = {}
        self.pads: dict[tuple[bytes, ClientId], Terms] = {}

    def terms(self, invite: Invite) -> Terms | None:
        """Return the terms of an invitation; None: its update is plain."""
        if invite.sum is None:
            return None
        assert self.world.scenario.rules.secure is not None
        return terms_of(
            run=RUN,
            round=int(invite.round_id),
            attempt=invite.sum.attempt,
            session=invite.sum.session,
            base=int(invite.base_version),
            model=hashlib.sha256(f"v{invite.base_version}".encode()).hexdigest(),
            threshold=self.world.scenario.rules.secure.threshold,
        )

    def opening(self, effect: OpenSum) -> Event:
        """Return the outcome of an opening."""
        summed = effect.sum
        try:
            opened = open_sum(summed.roster, summed.id, summed.masking, summed.survivors, summed.reveals)
        except NotOpened as fault:
            return OpeningFailed(effect.round_id, summed.session, summed.attempt, str(fault))
        wrong = tuple(ClientId(summed.roster.members[position].name) for position in sorted(opened.wrong))
        return SumOpened(effect.round_id, summed.session, summed.attempt, wrong)

    def check_fold(self, effect: Aggregate) -> None:
        """Check that every sum of a fold is that of its members' encoded updates; a plain fold has none."""
        if self.world.scenario.rules.secure is None:
            return
        digests = {each.client_id: each.digest for each in effect.contributions}
        if sorted(digests) != sorted(name for summed in effect.sums for name in summed.members):
            self.world.fail(f"the contributions {sorted(digests)} are not the members of the opened sums")
        for summed in effect.sums:
            opened = open_sum(summed.roster, summed.id, summed.masking, summed.survivors, summed.reveals)
            total, expected = np.zeros(SIZE, np.uint32), np.zeros(SIZE, np.uint32)
            for name in summed.members:
                total += self.masked[digests[name]]
                expected += self.encoded[name, effect.round_id]
            for stream in opened.streams:
                add_stream(total, stream.key, stream.sign)
            if not np.array_equal(total, expected):
                self.world.fail(f"the sum of session {summed.session} in round {effect.round_id} is wrong")
            if len(summed.members) < max(3, summed.roster.threshold):
                self.world.fail(f"a sum of {summed.members} was opened")

    def check_promises(self) -> None:
        """Check that no site has joined or signed anything with which two sums of one round could open."""
        for name, site in self.sites.items():
            signed: set[int] = set()
            for promise in site.written:
                if promise.round in signed:
                    self.world.fail(f"{name} gives {promise} after a signature of that round")
                if promise.kind == "signed":
                    signed.add(promise.round)


class SumsAgent(Endpoint, Protocol):
    """The agent whose members these are."""

    client_id: ClientId
    num_parts: int
    rng: random.Random

    def say(self, message: Said) -> None:
        """Send a message on the control stream, if there is one."""

    def masked(self, key: Key, update: Update) -> None:
        """Take a masked update into the spool."""

    def dies_here(self) -> bool:
        """Return whether the process crashes between two effects."""


class AgentSums:
    """The members of an agent; `encoded` and the promises are on its disk."""

    def __init__(self, world: World, agent: SumsAgent, sums: Sums) -> None:
        self._world, self._agent, self._sums = world, agent, sums
        self.encoded: set[Key] = set()
        self._members: dict[Key, Member] = {}

    @property
    def _site(self) -> Site:
        return self._sums.sites[self._agent.client_id]

    def crashed(self) -> None:
        """Forget what was in memory."""
        self._members.clear()

    def encode(self, key: Key) -> None:
        """Encode a finished update: it is on the disk from now on."""
        draw = random.Random(f"encoded {self._agent.client_id} {key}")
        values = np.frombuffer(draw.randbytes(4 * SIZE), np.uint32)
        self._sums.encoded.setdefault((self._agent.client_id, RoundId(key[2])), values)
        self.encoded.add(key)

    def objection(self, invitation: Invitation) -> str:
        """Return why this site does not train for a sum; empty: it does, or has trained."""
        assert invitation.secure is not None
        return "" if invitation.key in self.encoded else self._site.promises.fault(invitation.secure)

    def join(self, invitation: Invitation) -> None:
        """Join a session with the encoded update, or repeat the member's first message."""
        terms, known = invitation.secure, self._members.get(invitation.key)
        assert terms is not None
        if known is None or known.terms != terms:
            if known is not None and known.terms.attempt >= terms.attempt:
                return  # an invitation from before, which came late
            has_joined = self._site.promises.attempt_of(terms.run, terms.purpose, terms.round) >= terms.attempt
            if known is None and has_joined:
                self._say(terms, Gone(RESTARTED))
                return
            known = self._members[invitation.key] = self._site.member(terms)
        self._carry_out(invitation.key, known, known.start())

    def asked(self, told: Told) -> None:
        """Hand a question to its member, over the wire's form."""
        key = ("round", RUN, int(told.round_id))
        member = self._members.get(key)
        of = wire.SessionName(RUN, told.round_id, told.attempt, told.session)
        if member is None or (member.terms.attempt, member.terms.session) != (told.attempt, told.session):
            terms = terms_of(run=RUN, round=int(told.round_id), attempt=told.attempt, session=told.session)
            self._say(terms, Gone(RESTARTED))
            return
        message = wire.question_message(of, told.question, told.members)
        self._carry_out(key, member, member.ask(wire.question_of(message, member.num_members)))

    def forget(self, key: Key) -> None:
        """Leave a session, and delete its encoded update."""
        self._members.pop(key, None)
        self.encoded.discard(key)

    def _carry_out(self, key: Key, member: Member, effects: list[Effect]) -> None:
        for effect in effects:
            if self._agent.dies_here():
                return
            match effect:
                case KeepPromise(promise):
                    self._site.keep(promise)
                case Send(message):
                    self._say(member.terms, message)
                case Mask(streams):
                    pads = [(stream.key, stream.sign) for stream in streams]
                    seconds = self._agent.rng.uniform(0, MASKING_S)
                    self._world.after(seconds, self._masking(key, member, pads, streams), self._agent)

    def _masking(self, key: Key, member: Member, pads: list[tuple[bytes, int]], streams: object) -> Callable[[], None]:
        def mask() -> None:
            if self._members.get(key) is not member or key not in self.encoded:
                return
            name, terms = self._agent.client_id, member.terms
            for pad, _ in pads:
                if self._sums.pads.setdefault((pad, name), terms) != terms:
                    self._world.fail(f"{name} uses one pad twice: {terms}")
            cuts = sorted(self._agent.rng.sample(range(1, SIZE), 2))
            words = masked_in_parts(self._sums.encoded[name, RoundId(key[2])], streams, cuts)  # type: ignore[no-untyped-call]
            parts = f":p{self._agent.num_parts}" if self._agent.num_parts else ""
            short = hashlib.sha256(words.tobytes()).hexdigest()[:12]
            digest = Digest(f"{name}:r{terms.round}:a{terms.attempt}:{short}{parts}")
            self._sums.masked[digest] = words
            size, attempt = 4 * SIZE, terms.attempt
            update = Update(name, RoundId(terms.round), terms.base, digest, 1, 1.0, size, attempt=attempt)  # type: ignore[arg-type]
            self._agent.masked(key, update)

        return mask

    def _say(self, terms: Terms, message: MemberKeys | SealedShares | Agreement | Reveal | Gone) -> None:
        at = (self._agent.client_id, RoundId(terms.round), terms.session, terms.attempt)
        if isinstance(message, Gone):
            lost = message.reason == RESTARTED
            reason = FailureReason.SESSION_LOST if lost else FailureReason.SESSION_REFUSED
            left = SessionLeft(*at, reason, "" if lost else message.reason, message.refused)  # type: ignore[arg-type]
            self._world.remark(str(self._agent.client_id), f"leaves its session: {message.reason}")
            self._agent.say(Said(left))
            return
        of = wire.SessionName(RUN, RoundId(terms.round), terms.attempt, terms.session)
        content = wire.encoded(wire.answer_message(of, message)).hex()
        kind = KeysCame if isinstance(message, MemberKeys) else _KINDS[type(message)]
        self._agent.say(Said(kind(*at, content)))  # type: ignore[arg-type]


def told_of(effect: TellMember) -> Told:
    """Return a question as it travels."""
    return Told(effect.round_id, effect.session, effect.attempt, effect.members, effect.question)


def is_news(machine: RunMachine, said: Said) -> bool:
    """Return whether a member's message becomes an event, as the shell around secure sums decides it."""
    round_ = machine.round
    if not isinstance(round_, SecureRound) or round_.record.round_id != said.event.round_id:
        return False
    return round_.is_news_of(said.event)

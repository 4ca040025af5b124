"""The shell around this agent's members of sessions: the coordinator's questions in, promises, answers and masks out.

One task does the steps of each member in order, as a promise is durable before what follows it leaves. A member lives
in memory alone: after a restart its encoded update may join another attempt, and to everything else the answer is that
the session is lost. The metrics of an evaluation and statistics are in memory, too: after a restart they are made again
for another attempt.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from atoll.client.disk.stores import Stores
from atoll.client.policy.small_cells import guarded
from atoll.client.secure.member import Effect, KeepPromise, Mask, Member, Send, Stage
from atoll.client.session.agreed_terms import fault_of_terms
from atoll.client.session.events import (
    EvaluationRequest,
    Event,
    Invitation,
    Key,
    Masked,
    Request,
    StatisticsRequest,
    Sums,
)
from atoll.client.site.security import LEFT, OPENED, SiteSecurity
from atoll.client.work.masking import Masking
from atoll.client.work.noise_share import share_of
from atoll.client.work.runner import Runner
from atoll.ground.durable import told_outside
from atoll.ground.process import crash_points
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import Gone, MaskedWords, Reveal, SealedShares
from atoll.protocol.secure.terms import Terms
from atoll.protocol.secure.wire import BadForm, SessionName
from atoll.protocol.vocabulary import FailureReason, RoundId, RunId
from atoll.tensors.masked.metrics import encode_metrics, mask_metrics
from atoll.tensors.masked.whole_numbers import encode_numbers
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.safetensors_file import TensorFileCorrupted
from atoll.tensors.secure.masked_layout import layout_digest
from atoll.training.statistics.parts import SiteStatistics
from atoll.training.statistics.question import OtherLayout, Question, asked_parts, numbers_of

logger = logging.getLogger(__name__)

KIND_OF_KEY = {"update": "round", "evaluation": "version", "statistics": "statistics"}
"""The first part of the name of a request, by the purpose of its sum."""

RESTARTED = str(FailureReason.SESSION_LOST)
"""Reason to leave: this agent was restarted, and the secrets of its session were in memory."""


class _Membership:
    """One member, and the task that does its steps in order."""

    def __init__(self, member: Member, key: Key) -> None:
        self.member, self.key = member, key
        self.steps: asyncio.Queue[Callable[[], list[Effect]]] = asyncio.Queue()
        self.is_dropped = False  # whether its session is over for this agent


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Metrics of an evaluation, or statistics, encoded for a secure sum."""

    of_sum: str
    """`Terms.of_sum` of the sum that they are encoded for, in hexadecimal: they are in no other sum."""
    words: bytes = field(repr=False)


class SecureSums:
    """Members of the sessions that this agent is in.

    Args:
        site: this client's name.
        stores: the agent's state on disk.
        security: the site's part: its policy, its promises, its key; None: it joins no session.
        runner: of the ranks that mask their parts of an update.
        send: sends a message to the coordinator, if it is connected.
        spawn: runs a coroutine whose failure ends the agent.
        on_event: receives events for the session, on the event loop.
    """

    def __init__(
        self,
        site: str,
        stores: Stores,
        security: SiteSecurity | None,
        *,
        runner: Runner,
        send: Callable[[pb.ClientMessage], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"],
        on_event: Callable[[Event], None],
    ) -> None:
        self._site, self._security = site, security
        self._encoded, self._spool, self._masker = stores.encoded, stores.spool, Masking(stores, runner)
        self._noise_secret = stores.noise_secret
        self._send, self._spawn, self._on_event = send, spawn, on_event
        self._members: dict[Key, _Membership] = {}
        self._numbers: dict[Key, _Numbers] = {}  # in memory alone, as to make them again costs little
        self._masking = asyncio.Lock()

    @property
    def joins(self) -> bool:
        """Whether this agent can join sessions."""
        return self._security is not None and self._security.joins

    def objection(self, request: Request) -> str:
        """Return why this site does not work for the sum of a request, and log it; empty: it does, or has done so."""
        terms = request.secure
        if terms is None or request.key in self._encoded.entries() or request.key in self._numbers:
            return ""
        if self._security is None:
            return "this agent has no certificate (--insecure), so it joins no secure sum: enrol it with a join code"
        fault = fault_of_terms(request, terms) or self._security.fault(terms, request.run_id)
        if fault:
            self._note(terms, fault, LEFT)
        return fault

    # ------------------------------------------------------------ in

    def join(self, request: Request, sums: Sums | SiteStatistics | None = None) -> None:
        """Join a session with what is encoded, or repeat this member's first message.

        Args:
            request: with the terms of the sum.
            sums: to encode, of an evaluation or of statistics that have just been made.
        """
        terms, known = request.secure, self._members.get(request.key)
        assert terms is not None
        assert self._security is not None
        if known is not None and known.member.terms == terms:
            known.steps.put_nowait(known.member.start)
            return
        if fault := fault_of_terms(request, terms) or self._security.policy_fault(terms, request.run_id):
            self._refuse(terms, fault)
            return
        if not isinstance(request, Invitation) and (fault := self._encode(request, terms, sums)):
            self._refuse(terms, fault)
            return
        if known is not None and known.member.terms.attempt >= terms.attempt:
            self._refuse(terms, "another attempt of this round has begun here, under other terms")
            return
        if self._encoded_for(request.key) != terms.of_sum.hex():
            self._refuse(terms, "this attempt has other terms than the sum that was agreed to and encoded for here")
            return
        self._drop(request.key)
        if known is None and self._security.has_joined(terms):
            self._say(terms, Gone(RESTARTED))
            return
        membership = _Membership(self._security.member(self._site, terms), request.key)
        self._members[request.key] = membership
        membership.steps.put_nowait(membership.member.start)
        self._spawn(self._work(membership))

    def _encoded_for(self, key: Key) -> str:
        """Return the sum that a site's numbers are encoded for; empty: none.

        A coordinator that lets an attempt fail could ask for another one with less noise, a larger norm or a smaller
        quorum: neither the policy nor an approval nor the budget is asked about it again.
        """
        if key in self._encoded.entries():
            return self._encoded[key].terms
        return self._numbers[key].of_sum if key in self._numbers else ""

    def _encode(
        self, request: EvaluationRequest | StatisticsRequest, terms: Terms, sums: Sums | SiteStatistics | None
    ) -> str:
        """Encode metrics or statistics once, for all attempts at their sum; return why they cannot be added."""
        key = request.key
        if key in self._numbers:
            return ""
        if sums is None:
            return "what this site has measured is in another sum already"
        if isinstance(request, StatisticsRequest):
            assert request.question is not None
            assert isinstance(sums, SiteStatistics)
            return self._encode_statistics(key, terms, request.question, sums)
        assert not isinstance(sums, SiteStatistics)
        if terms.layout != layout_digest((), terms.metrics):
            return "the terms of an evaluation are of tensors, and it adds metrics alone"
        words, left_out = encode_metrics(sums, terms.metrics)
        self._numbers[key] = _Numbers(terms.of_sum.hex(), words)
        for sentence in left_out:
            logger.warning("not in the secure sum of the evaluation of version %d: %s", terms.round, sentence)
        return ""

    def _encode_statistics(self, key: Key, terms: Terms, question: Question, statistics: SiteStatistics) -> str:
        """Encode what the policy lets leave of statistics; parts that stay here count as absent."""
        assert self._security is not None
        try:
            asked = guarded(asked_parts(statistics, question), self._security.statistics_terms)
            words = encode_numbers(numbers_of(asked.parts, question))
        except OtherLayout as fault:
            return str(fault)
        self._numbers[key] = _Numbers(terms.of_sum.hex(), words)
        for place, why in asked.withheld.items():
            logger.info("not in the secure sum of request %d for statistics: %s: %s", key[2], ".".join(place), why)
        return ""

    def asked(self, message: pb.ServerMessage) -> None:
        """Hand a question of the coordinator to the member that it is for; another message is for no member."""
        if not wire.kind_of(message):
            return
        of = wire.name_of(message)
        membership = self._members.get((KIND_OF_KEY.get(of.purpose, ""), of.run, of.round))
        if membership is None or _name(membership.member.terms) != of:
            self._send(wire.answer_message(of, Gone(RESTARTED)))
            return
        member = membership.member

        def step() -> list[Effect]:
            try:
                return member.ask(wire.question_of(message, member.num_members))
            except BadForm as fault:
                return member.leave(f"{wire.kind_of(message)}: {fault}")

        membership.steps.put_nowait(step)

    def forget(self, key: Key) -> None:
        """Leave the session of a request, and delete what is encoded for it."""
        self._drop(key)
        self._delete(key)

    def _delete(self, key: Key) -> None:
        self._encoded.discard(key)
        self._numbers.pop(key, None)

    def _drop(self, key: Key) -> None:
        if (membership := self._members.pop(key, None)) is not None:
            membership.member.leave("it is over")
            membership.is_dropped = True
            membership.steps.put_nowait(list)  # wakes its task, which ends

    def policy_changed(self) -> None:
        """Leave the sessions that the changed policy does not allow."""
        for membership in self._members.values():
            assert self._security is not None
            member = membership.member
            fault = self._security.policy_fault(member.terms, RunId(member.terms.run))
            if fault and member.stage is not Stage.ENDED:
                membership.steps.put_nowait(partial(member.leave, fault))

    # ------------------------------------------------------------ out

    async def _work(self, membership: _Membership) -> None:
        """Do the steps of a member, one after the other."""
        while not membership.is_dropped:
            step = await membership.steps.get()
            try:
                for effect in step():
                    await self._carry_out(membership, effect)
            except (OSError, TensorFileCorrupted) as error:
                logger.error("the session of %s is left: %s", _work(membership.member.terms), error)
                why = told_outside(error) if isinstance(error, OSError) else "one is damaged"
                for effect in membership.member.leave(f"this site's files cannot be used: {why}"):
                    await self._carry_out(membership, effect)

    async def _carry_out(self, membership: _Membership, effect: Effect) -> None:
        member = membership.member
        assert self._security is not None
        match effect:
            case KeepPromise(promise):
                self._security.keep(promise)
                crash_points.reached("agent.promised", promise.kind)
            case Mask(streams, session):
                pairs = [(stream.key, stream.sign) for stream in streams]
                if member.terms.purpose == "update":
                    share = share_of(self._noise_secret, member.terms, session)
                    await self._mask(membership, pairs, share)
                elif (numbers := self._numbers.get(membership.key)) is not None and not membership.is_dropped:
                    self._say(member.terms, MaskedWords(mask_metrics(numbers.words, pairs)))
                    crash_points.reached("agent.masked")
            case Send(message):
                if isinstance(message, Gone):
                    self._note(member.terms, message.reason, LEFT)
                    logger.warning("left the secure sum of %s: %s", _work(member.terms), message.reason)
                if isinstance(message, SealedShares):
                    self._security.remember_peers()
                self._say(member.terms, message)
                if isinstance(message, Reveal):
                    crash_points.reached("agent.revealed")
                    self._note(member.terms, "its sum was opened", OPENED)
                    self._delete(membership.key)

    async def _mask(self, membership: _Membership, streams: list[tuple[bytes, int]], share: GridNoise | None) -> None:
        """Mask the encoded update into the spool; one that is there already waits for its answer.

        Only one is masked at a time: what an earlier attempt has begun ends before the next attempt masks.
        """
        key = membership.key
        async with self._masking:
            if membership.is_dropped or key in self._spool.entries() or key not in self._encoded.entries():
                return  # it waits for its answer, or its sum is over
            terms, encoded = membership.member.terms, self._encoded[key]
            digest = await self._masker.spooled(terms.task, encoded, terms.attempt, streams, share)
            if membership.is_dropped:
                self._spool.discard(key)
                return
        crash_points.reached("agent.masked")
        self._on_event(Masked(key, digest))

    def _refuse(self, terms: Terms, fault: str) -> None:
        self._note(terms, fault, LEFT)
        self._say(terms, Gone(f"{FailureReason.SESSION_REFUSED}: {fault}"))

    def _note(self, terms: Terms, text: str, action: str) -> None:
        """Write a line into the site's log of decisions; a full disk keeps no session from its end."""
        assert self._security is not None
        try:
            self._security.log(terms, text, action)
        except OSError as error:
            logger.error("the log of decisions lacks a line about %s: %s: %s", _work(terms), text, error)

    def _say(self, terms: Terms, message: Any) -> None:
        self._send(wire.answer_message(_name(terms), message))


_WORK = {"update": "round", "evaluation": "the evaluation of version", "statistics": "request for statistics"}


def _work(terms: Terms) -> str:
    return f"{_WORK[terms.purpose]} {terms.round}"


def _name(terms: Terms) -> SessionName:
    return SessionName(RunId(terms.run), RoundId(terms.round), terms.attempt, terms.session, terms.purpose)

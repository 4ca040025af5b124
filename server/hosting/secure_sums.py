"""The shell around the secure sums of a run: the terms of invitations, the checks of members' messages, the opening."""

import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from atoll.ground.printable import count_of, printable
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.statement import NotTrusted
from atoll.protocol.secure import wire
from atoll.protocol.secure.keys import exchanged
from atoll.protocol.secure.messages import Agreement, Answer, Gone, MaskedWords, MemberKeys, Reveal, SealedShares
from atoll.protocol.secure.site_key import check_certified, is_signed
from atoll.protocol.secure.terms import Terms
from atoll.protocol.secure.wire import BadForm, SessionName
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import ClientId, FailureReason, Purpose, RoundId, RunId, Version
from atoll.server.config.run import RunConfig
from atoll.server.files.versions import Versions
from atoll.server.folding.metric_sums import num_bytes_of, opened_metrics
from atoll.server.hosting.secure_terms import SumBase, terms_of, terms_of_evaluation
from atoll.server.opening.streams import NotOpened, open_sum
from atoll.server.rounds.events import AskEvaluation, Event, Invite
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.secure_evaluation import SecureEvaluation
from atoll.server.rounds.secure_round import SecureRound
from atoll.server.rounds.session_events import (
    KeysCame,
    MaskedCame,
    MemberAnswered,
    OfMember,
    OpeningFailed,
    OpenSum,
    SessionLeft,
    SharesCame,
    SharesRevealed,
    SumOpened,
    SumPlace,
    SurvivorsSigned,
    TellMember,
)
from atoll.tensors.masked.whole_numbers import opened_numbers
from atoll.tensors.secure.exact import WrongSum
from atoll.tensors.secure.masked_layout import Metrics

_ANSWERED: dict[type[Answer], type[MemberAnswered]] = {
    SealedShares: SharesCame,
    Agreement: SurvivorsSigned,
    Reveal: SharesRevealed,
}


class SecureSums:
    """Secure sums of one run: what its clients are told, and what they answer.

    Args:
        run_id: the run.
        task: its name, as sites list it.
        config: returns the run's settings.
        reducer: finds the versions of the model.
        machine: of the run.
        authorities: returns the certificates of the trusted authorities, PEM.
        num_ranks: aggregation ranks, which get parts of the masked updates; 0: there are none.
    """

    def __init__(
        self,
        run_id: RunId,
        task: str,
        config: Callable[[], RunConfig],
        reducer: Versions,
        machine: RunMachine,
        authorities: Callable[[], bytes],
        num_ranks: int = 0,
    ) -> None:
        self._run_id, self._task, self._config = run_id, task, config
        self._reducer, self._machine, self._authorities = reducer, machine, authorities
        self._receivers = tuple(range(num_ranks))

    # ------------------------------------------------------------ out

    def invited(self, effect: Invite) -> pb.SecureTerms:
        """Return the part of an invitation with the terms of its sum."""
        assert effect.sum is not None
        terms = self.terms(effect.round_id, effect.base_version, effect.sum)
        return pb.SecureTerms(terms=terms.canonical(), ranges=effect.sum.ranges)

    def terms(self, round_id: RoundId, base_version: Version, place: SumPlace) -> Terms:
        """Return the terms of one sum of an open round."""
        base = self._reducer.version(base_version)
        return terms_of(
            self._config(),
            run_id=self._run_id,
            task=self._task,
            round_id=round_id,
            place=place,
            base=SumBase(base_version, base.digest, base.manifest.layout, self._receivers),
        )

    def asked(self, effect: AskEvaluation) -> pb.SecureTerms:
        """Return the part of a request for an evaluation with the terms of its sum."""
        assert effect.sum is not None
        return pb.SecureTerms(terms=self.terms_of_evaluation(effect.version, effect.sum).canonical())

    def terms_of_evaluation(self, version: Version, place: SumPlace) -> Terms:
        """Return the terms of one sum of an open evaluation."""
        return terms_of_evaluation(
            self._config(),
            run_id=self._run_id,
            task=self._task,
            version=version,
            model=self._reducer.version(version).digest,
            place=place,
        )

    def question(self, effect: TellMember) -> pb.ServerMessage:
        """Return the message of a question to a member."""
        name = SessionName(self._run_id, effect.round_id, effect.attempt, effect.session, effect.purpose)
        return wire.question_message(name, effect.question, effect.members)

    # ------------------------------------------------------------ in

    def event_of(self, client_id: ClientId, message: pb.ClientMessage) -> Event | None:
        """Return the event of a member's message, of a refusal of it, or None: it can change nothing.

        A message that fails a check is its sender's end in this session alone, and never an exception.
        """
        of = wire.name_of(message)
        if (sums := self._sums_of(of)) is None:
            return None
        event = self._event(client_id, of, message, sums)
        if isinstance(event, MaskedCame):
            is_news = isinstance(sums, SecureEvaluation) and sums.is_news_of(event)
        else:
            is_news = event is not None and sums.is_news_of(event)
        return event if is_news else None

    def _sums_of(self, of: SessionName) -> SecureRound | SecureEvaluation | None:
        """Return the open round or evaluation that a session belongs to; None: it is over."""
        if of.purpose == "evaluation":
            evaluation = self._machine.sums_of_evaluation
            return evaluation if evaluation is not None and evaluation.number == of.round else None
        round_ = self._machine.round
        is_its = of.purpose == "update" and round_ is not None and round_.record.round_id == of.round
        return round_ if is_its and isinstance(round_, SecureRound) else None

    def _event(
        self, client_id: ClientId, of: SessionName, message: pb.ClientMessage, sums: SecureRound | SecureEvaluation
    ) -> OfMember | None:
        def check(event: KeysCame, keys: MemberKeys) -> None:
            if sums.is_news_of(event):
                self.check_keys(sums, of, client_id, keys)

        words = num_bytes_of(self.metrics) if isinstance(sums, SecureEvaluation) else None
        purpose: Purpose = "evaluation" if isinstance(sums, SecureEvaluation) else "update"
        return member_event(client_id, message, purpose, check, words)

    @property
    def metrics(self) -> Metrics:
        """The metrics of the run's sums."""
        rules = self._config().secure_rules
        assert rules is not None
        return rules.metrics

    def check_keys(
        self, sums: SecureRound | SecureEvaluation, of: SessionName, client_id: ClientId, keys: MemberKeys
    ) -> None:
        """Check a client's keys before they are in a roster; wrong ones would end the session for every member.

        Raises:
            NotTrusted: they are another client's, of other terms, or not signed by a certified key of this client.
        """
        if isinstance(sums, SecureEvaluation):
            terms = self.terms_of_evaluation(sums.evaluation.version, sums.place_of(client_id))
        else:
            terms = self.terms(of.round, sums.record.base_version, sums.place_of(client_id))
        check_keys(keys, client_id, terms, self._authorities())

    async def open(self, effect: OpenSum) -> Event:
        """Check on a thread what members have revealed, and return the outcome."""
        metrics = self.metrics if effect.purpose == "evaluation" else ()
        return await on_thread(None, opening_of, effect, metrics)


def member_event(
    client_id: ClientId,
    message: pb.ClientMessage,
    purpose: Purpose,
    check: Callable[[KeysCame, MemberKeys], None],
    words: int | None,
) -> OfMember | None:
    """Return the event of a member's message, or of its refusal; None: it has no place in a sum of this purpose.

    Args:
        client_id: the sender.
        message: of a session.
        purpose: of the sum.
        check: of a member's keys; raises NotTrusted.
        words: size of what a member adds [bytes]; None: it comes as an upload.
    """
    of = wire.name_of(message)
    at = (client_id, of.round, of.session, of.attempt)
    try:
        answer = wire.answer_of(message)
        if isinstance(answer, Gone):
            reason, _, detail = answer.reason.partition(": ")
            refused = tuple(ClientId(name) for name in answer.refused)
            return SessionLeft(*at, FailureReason(reason), printable(detail), refused, purpose)
        content = wire.encoded(message).hex()
        if isinstance(answer, MemberKeys):
            event = KeysCame(*at, content, purpose)
            check(event, answer)
            return event
        if isinstance(answer, MaskedWords):
            if words is not None and len(answer.words) != words:
                raise BadForm(f"words: {count_of(len(answer.words), 'byte')}; allowed in this sum: {words}")
            return None if words is None else MaskedCame(*at, content, purpose)
        return _ANSWERED[type(answer)](*at, content, purpose)
    except (BadForm, NotTrusted) as fault:
        return SessionLeft(*at, FailureReason.SESSION_REFUSED, str(fault), purpose=purpose)


def check_keys(keys: MemberKeys, client_id: ClientId, terms: Terms, authorities: bytes) -> None:
    """Check a client's keys for a session.

    Raises:
        NotTrusted: they are another client's, of other terms, of low order, or not signed by a certified key of this
            client.
    """
    if keys.name != client_id:
        raise NotTrusted(f"its keys are of {printable(keys.name)}")
    if keys.terms != terms.digest:
        raise NotTrusted("its keys are for other terms")
    probe = X25519PrivateKey.generate()
    for kind, key in (("mask key", keys.mask_key), ("box key", keys.box_key)):
        if exchanged(probe, key) is None:
            raise NotTrusted(f"its {kind} is a point of low order, which has no shared secret with any other")
    if not is_signed(keys.site.key, keys.statement(), keys.signature):
        raise NotTrusted("its keys are not signed by its site key")
    check_certified(keys.site, client_id, authorities, time.time())


def opening_of_numbers(effect: OpenSum, count: int) -> tuple[SumOpened | OpeningFailed, list[int]]:
    """Check what members of a session have revealed; return the outcome, and of an opened sum its `count` numbers."""
    summed, names = effect.sum, effect.sum.roster.members
    at = (effect.round_id, summed.session, summed.attempt)
    try:
        opened = open_sum(summed.roster, summed.id, summed.masking, summed.survivors, summed.reveals)
    except NotOpened as fault:
        return OpeningFailed(*at, str(fault), effect.purpose), []
    wrong = tuple(ClientId(names[position].name) for position in sorted(opened.wrong))
    try:
        numbers = opened_numbers(effect.words, [(stream.key, stream.sign) for stream in opened.streams], count)
    except WrongSum as fault:
        return SumOpened(*at, wrong, effect.purpose, fault=str(fault)), []
    return SumOpened(*at, wrong, effect.purpose), numbers


def opening_of(effect: OpenSum, metrics: Metrics = ()) -> SumOpened | OpeningFailed:
    """Check what members of a session have revealed, and return the outcome.

    Args:
        effect: what was revealed; of an evaluation, also the masked words.
        metrics: of an evaluation, those of the sum.
    """
    summed, names = effect.sum, effect.sum.roster.members
    at = (effect.round_id, summed.session, summed.attempt)
    try:
        opened = open_sum(summed.roster, summed.id, summed.masking, summed.survivors, summed.reveals)
    except NotOpened as fault:
        return OpeningFailed(*at, str(fault), effect.purpose)
    wrong = tuple(ClientId(names[position].name) for position in sorted(opened.wrong))
    if effect.purpose == "update":
        return SumOpened(*at, wrong)
    try:
        sums = opened_metrics(effect.words, [(stream.key, stream.sign) for stream in opened.streams], metrics)
    except WrongSum as fault:
        return SumOpened(*at, wrong, effect.purpose, fault=str(fault))
    return SumOpened(*at, wrong, effect.purpose, sums)

"""The shell around the secure sums of a run: the terms of invitations, the checks of members' messages, the opening."""

import time
from collections.abc import Callable

from atoll.ground.printable import printable
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.statement import NotTrusted
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import Agreement, Answer, Gone, MemberKeys, Reveal, SealedShares
from atoll.protocol.secure.site_key import check_certified, is_signed
from atoll.protocol.secure.terms import Terms
from atoll.protocol.secure.wire import BadForm, SessionName
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import ClientId, FailureReason, RoundId, RunId, Version
from atoll.server.config.run import RunConfig
from atoll.server.files.versions import Versions
from atoll.server.hosting.secure_terms import SumBase, terms_of
from atoll.server.opening.streams import NotOpened, open_sum
from atoll.server.rounds.events import (
    Event,
    Invite,
)
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.secure_round import SecureRound
from atoll.server.rounds.session_events import (
    KeysCame,
    MemberAnswered,
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

OfSession = KeysCame | MemberAnswered | SessionLeft
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

    def question(self, effect: TellMember) -> pb.ServerMessage:
        """Return the message of a question to a member."""
        name = SessionName(self._run_id, effect.round_id, effect.attempt, effect.session)
        return wire.question_message(name, effect.question, effect.members)

    # ------------------------------------------------------------ in

    def event_of(self, client_id: ClientId, message: pb.ClientMessage) -> Event | None:
        """Return the event of a member's message, of a refusal of it, or None: it can change nothing.

        A message that fails a check is its sender's end in this session alone, and never an exception.
        """
        round_, of = self._machine.round, wire.name_of(message)
        if not isinstance(round_, SecureRound) or round_.record.round_id != of.round:
            return None
        at = (client_id, of.round, of.session, of.attempt)
        try:
            answer = wire.answer_of(message)
            if isinstance(answer, Gone):
                reason, _, detail = answer.reason.partition(": ")
                refused = tuple(ClientId(name) for name in answer.refused)
                event: OfSession = SessionLeft(*at, FailureReason(reason), printable(detail), refused)
            elif isinstance(answer, MemberKeys):
                event = KeysCame(*at, wire.encoded(message).hex())
                if round_.is_news_of(event):
                    self.check_keys(round_, of, client_id, answer)
            else:
                event = _ANSWERED[type(answer)](*at, wire.encoded(message).hex())
        except (BadForm, NotTrusted) as fault:
            event = SessionLeft(*at, FailureReason.SESSION_REFUSED, str(fault))
        return event if round_.is_news_of(event) else None

    def check_keys(self, round_: SecureRound, of: SessionName, client_id: ClientId, keys: MemberKeys) -> None:
        """Check a client's keys before they are in a roster; wrong ones would end the session for every member.

        Raises:
            NotTrusted: they are another client's, of other terms, or not signed by a certified key of this client.
        """
        if keys.name != client_id:
            raise NotTrusted(f"its keys are of {printable(keys.name)}")
        terms = self.terms(of.round, round_.record.base_version, round_.place_of(client_id))
        if keys.terms != terms.digest:
            raise NotTrusted("its keys are for other terms")
        if not is_signed(keys.site.key, keys.statement(), keys.signature):
            raise NotTrusted("its keys are not signed by its site key")
        check_certified(keys.site, client_id, self._authorities(), time.time())

    async def open(self, effect: OpenSum) -> Event:
        """Check on a thread what members have revealed, and return the outcome."""
        return await on_thread(None, opening_of, effect)


def opening_of(effect: OpenSum) -> SumOpened | OpeningFailed:
    """Check what members of a session have revealed, and return the outcome."""
    summed, names = effect.sum, effect.sum.roster.members
    try:
        opened = open_sum(summed.roster, summed.id, summed.masking, summed.survivors, summed.reveals)
    except NotOpened as fault:
        return OpeningFailed(effect.round_id, summed.session, summed.attempt, str(fault))
    wrong = tuple(ClientId(names[position].name) for position in sorted(opened.wrong))
    return SumOpened(effect.round_id, summed.session, summed.attempt, wrong)

"""The verification of every message of the coordinator before it takes effect: the shell around `rollback_rules`."""

import logging
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.client.disk.seen_store import Memory
from atoll.client.session.events import Asked, Event, Invitation, StatisticsRequest
from atoll.client.session.rollback_rules import Refused, age_of, judge, run_of, timed
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.statement import NotTrusted, check_publisher, check_signature
from atoll.protocol.vocabulary import FailureReason

logger = logging.getLogger(__name__)


class Verifier:
    """Verifier of signatures, with the connection's publisher key, and of novelty, with the messages seen of each run.

    Args:
        site: this client's name.
        authorities: returns the certificates of the trusted authorities, PEM, for each new connection.
        memory: the newest round and version seen of each run.
        clock: returns seconds since the epoch.
    """

    def __init__(
        self, site: str, authorities: Callable[[], bytes], memory: Memory, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._site, self._authorities, self._clock = site, authorities, clock
        self._key: Ed25519PublicKey | None = None
        self._key_bytes = b""
        self._ahead = 0.0  # this clock minus the coordinator's at connection time [s]
        self.memory = memory

    def welcome(self, message: pb.ServerMessage) -> None:
        """Verify a connection's first message, and keep its publisher key for all later ones.

        Raises:
            NotTrusted: the key is not this coordinator's, or the message is not signed with it for this client, now.
        """
        now = self._clock()
        publisher = message.welcome.publisher
        key = check_publisher(publisher, self._authorities(), now)
        check_signature(message, self._site, key)
        self._note(message, None, now)
        if publisher.key != self._key_bytes:
            logger.info("the coordinator signs with the publisher key %s", publisher.key.hex()[:16])
        self._key, self._key_bytes = key, publisher.key
        self._ahead = age_of(message.signature.issued_us, now)

    def _note(self, message: pb.ServerMessage, event: Event | None, now: float) -> None:
        """Record a message as seen, or raise NotTrusted."""
        if isinstance(refused := self._judged(message, event, now), Refused):
            raise NotTrusted(f"{refused.reason}: {refused.detail}")

    def check(self, message: pb.ServerMessage, event: Event | None) -> Refused | None:
        """Return the reason to refuse a message whose content is `event`; None: it is accepted."""
        assert self._key is not None, "a Welcome comes first"
        try:
            check_signature(message, self._site, self._key)
        except NotTrusted as error:
            return Refused(FailureReason.BAD_SIGNATURE, str(error))
        judged = self._judged(message, event, self._clock())
        if judged is None and isinstance(event, Asked):
            _log(event)
        return judged

    def timed(self, message: pb.ServerMessage, event: Event | None) -> Event | None:
        """Return the event of a message with its remaining time as of now."""
        return timed(event, message.signature.issued_us, self._clock(), ahead=self._ahead)

    def _judged(self, message: pb.ServerMessage, event: Event | None, now: float) -> Refused | None:
        run_id = run_of(event)
        judged = judge(event, message.signature.issued_us, self.memory.seen(run_id), now, ahead=self._ahead)
        if isinstance(judged, Refused):
            return judged
        self.memory.note(run_id, judged)
        return None


def _log(asked: Asked) -> None:
    request = asked.request
    if isinstance(request, StatisticsRequest):
        about = {"run": request.run_id}
        logger.info("verified: request %d for statistics of %s", request.number, request.task, extra=about)
        return
    what = f"round {request.round_id}" if isinstance(request, Invitation) else f"the evaluation of {request.version}"
    extra: dict[str, object] = {
        "run": request.run_id,
        "round": request.round_id if isinstance(request, Invitation) else None,
    }
    logger.info("verified: %s of %s, version %s", what, request.run_id, request.model_digest[:12], extra=extra)

"""Checks every message of the coordinator before this agent acts on it: the shell around `verification`."""

import logging
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.client.disk.seen_store import Memory
from atoll.client.session.events import Asked, Event, Invitation
from atoll.client.session.rollback_rules import Refused, judge, run_of, timed
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.statement import NotTrusted, check_publisher, check_signature
from atoll.protocol.vocabulary import FailureReason

logger = logging.getLogger(__name__)


class Verifier:
    """Knows the coordinator's publisher key of the connection that stands, and what was seen of each run.

    Args:
        site: this client's name.
        authorities: whom it trusts, PEM; asked again for each connection.
        memory: of what was seen.
        clock: seconds since the epoch.
    """

    def __init__(
        self, site: str, authorities: Callable[[], bytes], memory: Memory, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._site, self._authorities, self._clock = site, authorities, clock
        self._key: Ed25519PublicKey | None = None
        self._key_bytes = b""
        self.memory = memory

    def welcome(self, message: pb.ServerMessage) -> None:
        """The first message of a connection: it says with which key the others are signed.

        Raises:
            NotTrusted: that key is not this coordinator's, or the message is not signed with it, for us and now.
        """
        now = self._clock()
        publisher = message.welcome.publisher
        key = check_publisher(publisher, self._authorities(), now)
        check_signature(message, self._site, key)
        self._note(message, None, now)
        if publisher.key != self._key_bytes:
            logger.info("the coordinator signs with the publisher key %s", publisher.key.hex()[:16])
        self._key, self._key_bytes = key, publisher.key

    def _note(self, message: pb.ServerMessage, event: Event | None, now: float) -> None:
        """Raise NotTrusted, or remember."""
        if isinstance(refused := self._judged(message, event, now), Refused):
            raise NotTrusted(f"{refused.reason}: {refused.detail}")

    def check(self, message: pb.ServerMessage, event: Event | None) -> Refused | None:
        """Why a message does not count; None when it does. `event` is what it says."""
        assert self._key is not None, "a Welcome comes first"
        try:
            check_signature(message, self._site, self._key)
        except NotTrusted as error:
            return Refused(FailureReason.BAD_SIGNATURE, str(error))
        judged = self._judged(message, event, self._clock())
        if judged is None and isinstance(event, Asked):
            _tell(event)
        return judged

    def timed(self, message: pb.ServerMessage, event: Event | None) -> Event | None:
        """What a message says, with the time that is left of it by now."""
        return timed(event, message.signature.issued_us, self._clock())

    def _judged(self, message: pb.ServerMessage, event: Event | None, now: float) -> Refused | None:
        run_id = run_of(event)
        judged = judge(event, message.signature.issued_us, self.memory.seen(run_id), now)
        if isinstance(judged, Refused):
            return judged
        self.memory.note(run_id, judged)
        return None


def _tell(asked: Asked) -> None:
    request = asked.request
    what = f"round {request.round_id}" if isinstance(request, Invitation) else f"the evaluation of {request.version}"
    logger.info("verified: %s of %s, version %s", what, request.run_id, request.model_digest[:12])

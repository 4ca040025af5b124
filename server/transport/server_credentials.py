"""What a port shows of its owner in each handshake: the newest certificate, without a restart.

gRPC frees what it has prepared of an older certificate as soon as it is given a newer one, although a handshake that
was told "as in the last one" a moment ago may be about to use it (grpc issue 36693): two strangers who dial at that
moment end the process. So a newer one is given only when there is one, and only when the last answer was a while ago.
gRPC asks for one handshake of a port at a time, and asks no other while it waits.
"""

import time
from collections.abc import Callable

import grpc

from atoll.protocol.identity.keeper import Keeper

SETTLE_S = 0.5
"""Seconds after which a handshake has taken what it was told to use: it is its next step, some microseconds of work."""


def server_credentials(keeper: Keeper, *, asks_for_certificates: bool) -> grpc.ServerCredentials:
    """For a port that shows what is kept, and hears only those with a certificate of its authority if it asks."""
    shown = Shown(keeper, asks_for_certificates=asks_for_certificates)
    return grpc.dynamic_ssl_server_credentials(shown.configuration(), shown, asks_for_certificates)  # type: ignore[arg-type]


class Shown:
    """What one port shows in the next handshake. gRPC calls it on a thread of its own; None: as in the last one.

    Args:
        keeper: of the owner's credential.
        asks_for_certificates: whether callers must have one of the same authority.
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        asks_for_certificates: bool,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._keeper, self._asks = keeper, asks_for_certificates
        self._clock, self._sleep = clock, sleep
        self._last, self._answered_at = keeper.current, clock()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """For the next handshake."""
        try:
            if self._keeper.current is self._last:
                return None
            self._sleep(max(0.0, self._answered_at + SETTLE_S - self._clock()))
            return self.configuration()
        finally:
            self._answered_at = self._clock()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """The newest credential, for gRPC."""
        own = self._last = self._keeper.current
        return grpc.ssl_server_certificate_configuration(
            [(own.key_pem, own.certificate_pem)], own.ca_pem if self._asks else None
        )

"""The credentials that a port shows in each handshake: the newest certificate, without a restart.

gRPC frees the data prepared from an older certificate as soon as it gets a newer one, although a handshake that was
just told "unchanged" may be about to use it (grpc issue 36693): two strangers that dial at that moment crash the
process. So a newer certificate is handed over only if there is one, and only a while after the last answer. gRPC asks
for one handshake of a port at a time, and asks for no other while it waits.
"""

import time
from collections.abc import Callable

import grpc

from atoll.protocol.identity.keeper import Keeper

SETTLE_S = 0.5
"""Time after which a handshake has used its answer [s]; this is its next step, microseconds of work."""


def server_credentials(
    keeper: Keeper, *, asks_for_certificates: bool, on_handshake: Callable[[], None] = lambda: None
) -> grpc.ServerCredentials:
    """Make the credentials of a port.

    Args:
        keeper: the port's credential; each handshake shows the newest.
        asks_for_certificates: whether callers must have a certificate of the same authority.
        on_handshake: called when a handshake begins, on a thread of gRPC.
    """
    shown = Shown(keeper, asks_for_certificates=asks_for_certificates, on_handshake=on_handshake)
    return grpc.dynamic_ssl_server_credentials(shown.configuration(), shown, asks_for_certificates)  # type: ignore[arg-type]


class Shown:
    """Configuration of one port's next handshake. gRPC calls it on a separate thread; None: unchanged.

    Args:
        keeper: the port's credential.
        asks_for_certificates: whether callers must have a certificate of the same authority.
        on_handshake: called when a handshake begins.
        clock: a monotonic clock [s].
        sleep: waits for a time [s].
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        asks_for_certificates: bool,
        on_handshake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._keeper, self._asks = keeper, asks_for_certificates
        self._clock, self._sleep, self._on_handshake = clock, sleep, on_handshake
        self._last, self._answered_at = keeper.current, clock()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration for the next handshake; None: unchanged."""
        self._on_handshake()
        try:
            if self._keeper.current is self._last:
                return None
            self._sleep(max(0.0, self._answered_at + SETTLE_S - self._clock()))
            return self.configuration()
        finally:
            self._answered_at = self._clock()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the newest credential in gRPC's form."""
        newest = self._last = self._keeper.current
        return grpc.ssl_server_certificate_configuration(
            [(newest.key_pem, newest.certificate_pem)], newest.ca_pem if self._asks else None
        )

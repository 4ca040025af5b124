"""How one listens: who takes a port, and what the other end must prove before it is heard."""

from typing import Protocol

import grpc

from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.wire.channel import bracketed, loopback_only, parse_address
from atoll.server.errors import OperatorError
from atoll.server.transport.server_credentials import server_credentials


class Listener(Protocol):
    """Takes ports."""

    proves_callers: bool
    """Whether whoever calls there has shown a certificate; otherwise everybody is taken at their word (`guard`)."""

    def bind(self, server: grpc.aio.Server, listen: str) -> str:
        """Take `host:port`; port 0: the system chooses. Returns the address.

        Raises:
            OperatorError: it is in use, or not allowed.
            ConfigError: not an address where this may listen.
        """


class InsecureListener:
    """Hears everybody on this machine, and nobody else."""

    proves_callers = False

    def bind(self, server: grpc.aio.Server, listen: str) -> str:
        """See `Listener`."""
        host, port = loopback_only(listen)
        try:
            return f"{bracketed(host)}:{server.add_insecure_port(f'{bracketed(host)}:{port}')}"
        except RuntimeError as error:
            raise cannot_listen(listen) from error


class MutualListener:
    """Proves who listens, and hears only those who have a certificate of the same authority.

    Args:
        keeper: of the listener's own credential; each handshake takes the newest, so that a renewal needs no restart.
    """

    proves_callers = True

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def bind(self, server: grpc.aio.Server, listen: str) -> str:
        """See `Listener`."""
        host, port = parse_address(listen)
        credentials = server_credentials(self._keeper, asks_for_certificates=True)
        try:
            return f"{bracketed(host)}:{server.add_secure_port(f'{bracketed(host)}:{port}', credentials)}"
        except RuntimeError as error:
            raise cannot_listen(listen) from error


def cannot_listen(listen: str) -> OperatorError:
    """The operator's mistake when gRPC does not get a port."""
    return OperatorError(f"cannot listen on {listen}: the port is in use, or not allowed")

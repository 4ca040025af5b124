"""The listeners: they bind ports, insecure on loopback or with mutual TLS."""

from typing import Protocol

import grpc

from atoll.ground.address import bracketed
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.wire.channel import loopback_only, parse_address
from atoll.server.errors import OperatorError
from atoll.server.transport.server_credentials import server_credentials
from atoll.server.transport.sockets import hold_little
from atoll.server.transport.unproven import Unproven


class Listener(Protocol):
    """Listener that binds the ports of a server."""

    proves_callers: bool
    """Whether every caller has shown a certificate; otherwise callers are trusted (`guard`)."""

    def proven(self, peer: str) -> None:
        """Record a call of a member over the connection of a peer, named as gRPC does."""

    def bind(self, server: grpc.aio.Server, listen: str) -> str:
        """Bind `host:port`, port 0 for one that the system chooses; return the address.

        Raises:
            OperatorError: the port is in use, or not allowed.
            ConfigError: the string is not an address where this listener may listen.
        """


class InsecureListener:
    """Listener for callers on this machine only, without certificates."""

    proves_callers = False

    def proven(self, peer: str) -> None:
        """Record nothing: nothing is proven here."""

    def bind(self, server: grpc.aio.Server, listen: str) -> str:
        """Bind a loopback address; see `Listener`."""
        host, port = loopback_only(listen)
        try:
            bound = server.add_insecure_port(f"{bracketed(host)}:{port}")
        except RuntimeError as error:
            raise cannot_listen(listen) from error
        hold_little(bound)
        return f"{bracketed(host)}:{bound}"


class MutualListener:
    """Listener that proves its identity, and admits only callers with a certificate of the same authority.

    Args:
        keeper: the listener's credential; each handshake uses the newest, so that a renewal needs no restart.
    """

    proves_callers = True

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._ports: list[Unproven] = []

    def proven(self, peer: str) -> None:
        """Record a call of a member; see `Listener`."""
        for port in self._ports:
            port.proven(peer)

    def bind(self, server: grpc.aio.Server, listen: str) -> str:
        """Bind an address; see `Listener`."""
        host, port = parse_address(listen)
        unproven = Unproven(lambda: self._keeper.current)
        credentials = server_credentials(self._keeper, asks_for_certificates=True, on_handshake=unproven.begun)
        try:
            bound = server.add_secure_port(f"{bracketed(host)}:{port}", credentials)
        except RuntimeError as error:
            raise cannot_listen(listen) from error
        hold_little(bound)
        unproven.watch(bound)
        self._ports.append(unproven)
        return f"{bracketed(host)}:{bound}"


def cannot_listen(listen: str) -> OperatorError:
    """Make the operator's error for a port that gRPC cannot bind."""
    return OperatorError(f"cannot listen on {listen}: the port is in use, or not allowed")

"""The dialers: they open channels to servers, which must prove their identity before any byte is sent."""

from collections.abc import Sequence
from typing import Protocol

import grpc

from atoll.protocol.identity.certificates import server_name
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import Identity
from atoll.protocol.wire.channel import Option, Options, client_options, loopback_only, parse_address


class Dialer(Protocol):
    """Dialer of channels to servers, with its newest credential."""

    @property
    def credential(self) -> Credential | None:
        """Newest credential; None: the connection is insecure, and neither end proves its identity."""

    def check(self, address: str) -> None:
        """Check that an address may be dialled; raises ConfigError."""

    def channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.aio.Channel:
        """Open a channel for asyncio.

        Args:
            address: host:port of the server.
            server: identity that it must prove.
            options: gRPC options, which take precedence over `client_options`.

        Raises:
            ConfigError: the address must not be dialled.
        """

    def blocking_channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.Channel:
        """Open a channel with blocking calls, for commands and threads; arguments and errors of `channel`."""


class InsecureDialer:
    """Dialer without TLS and credentials, on this machine only."""

    credential = None

    def check(self, address: str) -> None:
        """Refuse an address on another machine (ConfigError)."""
        loopback_only(address)

    def channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.aio.Channel:
        """Open a plain channel; raises ConfigError for another machine."""
        self.check(address)
        return grpc.aio.insecure_channel(address, options=client_options(options))

    def blocking_channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.Channel:
        """Open a plain channel; raises ConfigError for another machine."""
        self.check(address)
        return grpc.insecure_channel(address, options=client_options(options))


class MutualDialer:
    """Dialer with mutual TLS 1.3: both ends prove their identities by certificates of one authority.

    The server's certificate must have the DNS name of its identity. So its address does not matter, and a client that
    listens there gains nothing: its certificate has no such name.

    Args:
        keeper: keeps the dialer's credential; each channel takes the newest, so a renewal needs no restart.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    @property
    def credential(self) -> Credential:
        """The keeper's newest credential."""
        return self._keeper.current

    def check(self, address: str) -> None:
        """Refuse a string that is not an address (ConfigError)."""
        parse_address(address)

    def channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.aio.Channel:
        """Open a channel that sends nothing before both ends have proven their identities.

        Raises:
            ConfigError: the address is not valid.
        """
        self.check(address)
        return grpc.aio.secure_channel(address, self._credentials(), options=options_to(server, options))

    def blocking_channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.Channel:
        """Open a channel as `channel` does, with blocking calls."""
        self.check(address)
        return grpc.secure_channel(address, self._credentials(), options=options_to(server, options))

    def _credentials(self) -> grpc.ChannelCredentials:
        own = self.credential
        return grpc.ssl_channel_credentials(own.ca_pem, own.key_pem, own.certificate_pem)


def options_to(server: Identity, more: Sequence[Option] = ()) -> Options:
    """Return the options of a channel whose server must have the certificate of `server`; `more` take precedence."""
    return client_options([*more, ("grpc.ssl_target_name_override", server_name(server))])

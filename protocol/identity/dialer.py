"""How one dials: who opens a channel, and what the other end must prove before a byte is sent."""

from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from atoll.protocol.identity.certificates import server_name
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import Identity
from atoll.protocol.wire.channel import client_options, loopback_only, parse_address

Option = tuple[str, int | str]


class Dialer(Protocol):
    """Opens channels to servers that it knows by name; what it proves of itself is the newest."""

    def check(self, address: str) -> None:
        """Raise ConfigError when this address is not to be dialled."""

    def channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.aio.Channel:
        """A channel for asyncio; `options` come on top of `client_options`.

        Raises:
            ConfigError: not to be dialled.
        """

    def blocking_channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.Channel:
        """A channel for a command that waits for its answer; raises the same."""


class InsecureDialer:
    """Nothing is proven and nothing encrypted: within one machine only."""

    def check(self, address: str) -> None:
        """Refuse what is not this machine (ConfigError)."""
        loopback_only(address)

    def channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.aio.Channel:
        """A plain channel. Raises ConfigError for another machine."""
        self.check(address)
        return grpc.aio.insecure_channel(address, options=_options(options))

    def blocking_channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.Channel:
        """A plain channel. Raises ConfigError for another machine."""
        self.check(address)
        return grpc.insecure_channel(address, options=_options(options))


class MutualDialer:
    """Both ends prove who they are, by certificates of one authority; TLS 1.3.

    The server's certificate must be for the name that follows from its identity, so it matters neither on which
    address it is reached, nor does it help a client to listen there: its certificate has no such name.

    Args:
        keeper: of one's own credential; each channel takes the newest, so that a renewal needs no restart.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def check(self, address: str) -> None:
        """Refuse what is no address (ConfigError)."""
        parse_address(address)

    def channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.aio.Channel:
        """A channel on which nothing is sent before both have proven who they are.

        Raises:
            ConfigError: no address.
        """
        self.check(address)
        return grpc.aio.secure_channel(address, self._credentials(), options=options_to(server, options))

    def blocking_channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.Channel:
        """The same for a command that waits for its answer."""
        self.check(address)
        return grpc.secure_channel(address, self._credentials(), options=options_to(server, options))

    def _credentials(self) -> grpc.ChannelCredentials:
        own = self._keeper.current
        return grpc.ssl_channel_credentials(own.ca_pem, own.key_pem, own.certificate_pem)


def options_to(server: Identity, more: Sequence[Option] = ()) -> list[tuple[str, Any]]:
    """Of a channel to a server whose certificate must have its name; `more` come on top of `client_options`."""
    return _options(more, ("grpc.ssl_target_name_override", server_name(server)))


def _options(more: Sequence[Option], *own: Option) -> list[tuple[str, Any]]:
    return list((dict(client_options()) | dict(more) | dict(own)).items())  # of two of one name gRPC takes the first

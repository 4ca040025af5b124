"""How one dials: who opens a channel, and what the other end must prove before a byte is sent."""

from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from atoll.protocol.channel import client_options, loopback_only
from atoll.protocol.identity.names import Identity

Option = tuple[str, int | str]


class Dialer(Protocol):
    """Opens channels to servers that it knows by name; what it proves of itself, it reads anew for each."""

    def check(self, address: str) -> None:
        """Raise ConfigError when this address is not to be dialled."""

    def channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.aio.Channel:
        """A channel for asyncio; `options` come on top of `client_options`."""

    def blocking_channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.Channel:
        """A channel for a command that waits for its answer."""


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


def _options(more: Sequence[Option]) -> list[tuple[str, Any]]:
    return list((dict(client_options()) | dict(more)).items())  # of two of one name gRPC takes the first

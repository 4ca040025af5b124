"""How one listens: who takes a port, and what the other end must prove before it is heard."""

from typing import Protocol

import grpc

from atoll.protocol.channel import loopback_only
from atoll.server.coordinator import OperatorError


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
        bracketed = f"[{host}]" if ":" in host else host
        try:
            return f"{bracketed}:{server.add_insecure_port(f'{bracketed}:{port}')}"
        except RuntimeError as error:
            raise cannot_listen(listen) from error


def cannot_listen(listen: str) -> OperatorError:
    """The operator's mistake when gRPC does not get a port."""
    return OperatorError(f"cannot listen on {listen}: the port is in use, or not allowed")

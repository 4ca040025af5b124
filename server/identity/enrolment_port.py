"""The port for callers that are not members yet: TLS that shows the coordinator's certificate and asks for none.

It is a separate server, with few and short calls, so that strangers that keep it busy cannot block members. (gRPC's
Python asks for certificates on a port always or never, so members and strangers cannot share one.)
"""

import grpc

from atoll.protocol import services as rpc
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.wire.channel import server_options
from atoll.server.audit.calls import CallAudit
from atoll.server.errors import OperatorError
from atoll.server.identity.enrolments import Enrolments
from atoll.server.identity.guard import Guard
from atoll.server.identity.membership_services import EnrolmentService
from atoll.server.transport.server_credentials import server_credentials
from atoll.server.transport.shutdown import stop_servers

CALLS_MAX = 32
MESSAGE_BYTES_MAX = 16 * 1024
IDLE_S, AGE_S = 15, 60
SHORT_CALLS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_connection_idle_ms", IDLE_S * 1000),
    ("grpc.max_connection_age_ms", AGE_S * 1000),
    ("grpc.max_connection_age_grace_ms", AGE_S * 1000),  # or a Watch, which never ends, holds its place for ever
    ("grpc.max_concurrent_streams", 2),
)
"""Options of a port for strangers: small messages, few calls, short connections."""


class EnrolmentPort:
    """Server of enrolments; it answers once it is started.

    Args:
        enrolments: the coordinator's enrolments.
        keeper: the coordinator's credential.
        guard: admits strangers only to the calls that are open to all.
        audit: records the refused calls of strangers.
        listen: host:port; port 0: the system chooses.
        address: the address that members dial.
        admin_address: the address that owners, operators and auditors dial.

    Raises:
        OperatorError: the port is in use, or not allowed.
    """

    def __init__(
        self,
        enrolments: Enrolments,
        keeper: Keeper,
        guard: Guard,
        audit: CallAudit,
        listen: str,
        *,
        address: str,
        admin_address: str,
    ) -> None:
        options = server_options(SHORT_CALLS)
        interceptors = [audit, guard]  # the first records the second's refusals
        self.server = grpc.aio.server(options=options, interceptors=interceptors, maximum_concurrent_rpcs=CALLS_MAX)
        rpc.add_servicer(EnrolmentService(enrolments, address, admin_address), self.server, "Enrolment")
        credentials = server_credentials(keeper, asks_for_certificates=False)
        host = listen.rpartition(":")[0]
        try:
            self.address = f"{host}:{self.server.add_secure_port(listen, credentials)}"
        except RuntimeError as error:
            what = f"cannot listen for enrolments on {listen}: the port is in use, or not allowed"
            raise OperatorError(what) from error

    async def start(self) -> None:
        """Start answering calls."""
        await self.server.start()

    async def stop(self) -> None:
        """End all calls within a bounded time."""
        await stop_servers((self.server, self.address))

"""The ports of a coordinator: one for clients and aggregation ranks, one for the operator's commands."""

import asyncio
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.bulk import add_coordinator
from atoll.protocol.channel import server_options
from atoll.server.aggregation_service import AggregationService
from atoll.server.audit.calls import CallAudit
from atoll.server.call_limits import CallLimits, Connections
from atoll.server.coordinator import Coordinator
from atoll.server.identity.guard import Guard
from atoll.server.identity.listener import Listener
from atoll.server.limits import Callers
from atoll.server.service import AdminService, CoordinatorService

CALLS_SPARE = 100
"""Calls that may be open at once of those who never say Hello."""

ADMIN_CALLS_MAX = 100


@dataclass(frozen=True, slots=True)
class Ports:
    """Two servers, and where they listen."""

    clients: grpc.aio.Server
    admins: grpc.aio.Server
    address: str
    """Of the clients' port."""
    admin_address: str

    @classmethod
    async def open(cls, coordinator: Coordinator, listener: Listener) -> "Ports":
        """Take both ports; nothing is answered before `start`.

        Raises:
            OperatorError: a port is in use, or not allowed.
        """
        config = coordinator.config
        calls = config.calls_per_client * config.max_connections + CALLS_SPARE
        limits = CallLimits(Callers(config.calls_per_client), Connections().end)
        guard = Guard(coordinator.admission if listener.proves_callers else None)
        interceptors = [CallAudit(coordinator.audit), limits, guard]  # the first sees what the others refuse
        clients = grpc.aio.server(interceptors=interceptors, options=server_options(), maximum_concurrent_rpcs=calls)
        add_coordinator(CoordinatorService(coordinator), clients)
        if coordinator.ranks is not None:
            rpc.add_AggregationServicer_to_server(AggregationService(coordinator, coordinator.ranks), clients)
        await _add_health(clients, "Coordinator")
        admins = grpc.aio.server(
            interceptors=interceptors, options=server_options(), maximum_concurrent_rpcs=ADMIN_CALLS_MAX
        )
        rpc.add_AdminServicer_to_server(AdminService(coordinator), admins)
        await _add_health(admins, "Admin")
        reflection.enable_server_reflection(
            [*map(_full_name, ("Coordinator", "Admin")), health.SERVICE_NAME, reflection.SERVICE_NAME], admins
        )
        return cls(clients, admins, listener.bind(clients, config.listen), listener.bind(admins, config.admin))

    async def start(self) -> None:
        """Answer from now on."""
        await self.admins.start()
        await self.clients.start()

    async def stop(self) -> None:
        """End all calls, soon."""
        await asyncio.gather(self.clients.stop(grace=0.2), self.admins.stop(grace=0.2))


async def _add_health(server: grpc.aio.Server, service: str) -> None:
    """Tell whoever asks that this service is here."""
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in ("", _full_name(service)):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)


def _full_name(service: str) -> str:
    name: str = pb.DESCRIPTOR.services_by_name[service].full_name
    return name

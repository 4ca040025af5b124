"""The ports of a coordinator: clients and aggregation ranks, the operator's commands, enrolment."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.vocabulary import ClientId
from atoll.protocol.wire.bulk_messages import add_coordinator
from atoll.protocol.wire.channel import is_wildcard, reached_as, server_options
from atoll.server.audit.calls import CallAudit
from atoll.server.config.process import CoordinatorConfig
from atoll.server.hosting.coordinator import Coordinator
from atoll.server.identity.enrolment_port import SHORT_CALLS, EnrolmentPort
from atoll.server.identity.enrolments import Enrolments
from atoll.server.identity.guard import Guard
from atoll.server.identity.membership_services import MembershipService
from atoll.server.identity.remote_signer import RemoteSigner, SigningService
from atoll.server.identity.setup import Gate, Members
from atoll.server.services.aggregation_service import AggregationService
from atoll.server.services.coordinator_service import AdminService, CoordinatorService
from atoll.server.transport.call_limits import CallLimits, Connections
from atoll.server.transport.limits import Callers, calls_max, connections_max
from atoll.server.transport.listener import cannot_listen
from atoll.server.transport.shutdown import stop_servers

CLOCKS = "clocks"
"""Name under which the health service reports whether the clocks agree."""
ADMIN_CALLS_MAX = 100
"""Largest number of open calls at the operator's port."""
PROBES_MAX = 32
"""Largest number of open calls at the port for probes."""


@dataclass(frozen=True, slots=True)
class Ports:
    """gRPC servers of the ports and their addresses."""

    clients: grpc.aio.Server
    admins: grpc.aio.Server
    address: str
    """host:port for clients and aggregation ranks."""
    admin_address: str
    """host:port for the operator's commands."""
    enrolment: EnrolmentPort | None
    """The port for enrolment; None in an insecure coordinator, which checks no certificates."""
    service: AdminService
    """The service of the operator's port."""
    keeper: Keeper | None = None
    """Keeper of the coordinator's credential; None: it has none."""
    probes: tuple[grpc.aio.Server, str] | None = None
    """The port for probes without TLS and its address; None: the settings name none."""

    @classmethod
    async def open(cls, coordinator: Coordinator, gate: Gate) -> "Ports":
        """Bind the ports, with their services and interceptors. No call is answered before `start`.

        Raises:
            OperatorError: a port is in use or not allowed.
        """
        config, members = coordinator.config, gate.members
        register = coordinator.admission if gate.listener.proves_callers else None
        client_guard, admin_guard = (Guard(register, gate.listener.proven) for _ in range(2))
        clients = _server(coordinator, client_guard, calls_max(config.max_connections, config.calls_per_client))
        admins = _server(coordinator, admin_guard, ADMIN_CALLS_MAX)
        enrolments = members.enrolments if members is not None else None
        add_coordinator(CoordinatorService(coordinator), clients)
        if coordinator.ranks is not None:
            rpc.add_servicer(AggregationService(coordinator, coordinator.ranks), clients, "Aggregation")
        service = AdminService(coordinator, enrolments)
        rpc.add_servicer(service, admins, "Admin")
        if enrolments is not None:
            _end_calls_of_revoked(coordinator, enrolments, (client_guard, admin_guard))
            if isinstance(gate.signer, RemoteSigner):
                rpc.add_servicer(SigningService(gate.signer), clients, "Signing")
            for server in (clients, admins):
                rpc.add_servicer(MembershipService(enrolments), server, "Membership")
        checks = [await _add_health(clients, "Coordinator"), await _add_health(admins, "Admin")]
        reflected = (_full_name("Coordinator"), _full_name("Admin"), health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, admins)
        address, admin_address = gate.listener.bind(clients, config.listen), gate.listener.bind(admins, config.admin)
        enrolment = None
        if members is not None:
            guard, audit = Guard(register), CallAudit(coordinator.audit)
            enrolment = _enrolment_port(config, members, guard, audit, address, admin_address)
            checks.append(await _add_health(enrolment.server, "Enrolment"))  # for probes, which have no certificate
        probes = None
        if config.health:
            probes, service_checks = await _open_probes(config.health)
            checks.append(service_checks)
        _report_clocks(coordinator, checks)
        keeper = members.keeper if members is not None else None
        return cls(clients, admins, address, admin_address, enrolment, service, keeper, probes)

    async def start(self) -> None:
        """Start answering calls, the operator's port first."""
        await self.admins.start()
        await self.clients.start()
        if self.enrolment is not None:
            await self.enrolment.start()
        if self.probes is not None:
            await self.probes[0].start()

    async def stop(self) -> None:
        """Stop all servers; calls that are open have a short grace period."""
        ends = [stop_servers((self.clients, self.address), (self.admins, self.admin_address))]
        if self.enrolment is not None:
            ends.append(self.enrolment.stop())
        if self.probes is not None:
            ends.append(stop_servers(self.probes))
        await asyncio.gather(*ends)
        await self.service.stop_reading()


def _server(coordinator: Coordinator, guard: Guard, calls: int) -> grpc.aio.Server:
    limits = CallLimits(Callers(coordinator.config.calls_per_client), Connections().end)
    audit = CallAudit(coordinator.audit)  # one for each server, like the guard: it caches the handlers of its server
    interceptors = [audit, limits, guard]  # in this order: the audit also records the others' refusals
    options = server_options(connections_max=connections_max(coordinator.config.max_connections))
    return grpc.aio.server(options=options, interceptors=interceptors, maximum_concurrent_rpcs=calls)


def _end_calls_of_revoked(coordinator: Coordinator, enrolments: Enrolments, guards: Iterable[Guard]) -> None:
    """Make a revocation end the open calls of the identity and, for a client, its membership in the runs."""

    def revoked(identity: Identity) -> None:
        for guard in guards:
            coordinator.spawn(guard.look_again())
        if identity.role is Role.CLIENT:
            coordinator.attendance.revoked(ClientId(identity.name))

    enrolments.on_revoked(revoked)


def _enrolment_port(
    config: CoordinatorConfig, members: Members, guard: Guard, audit: CallAudit, address: str, admin_address: str
) -> EnrolmentPort:
    port = EnrolmentPort(
        members.enrolments,
        members.keeper,
        guard,
        audit,
        config.enrol_address,
        address=reached_as(address, config.public),
        admin_address=reached_as(admin_address, config.public) if is_wildcard(admin_address) else admin_address,
    )
    members.enrolments.addresses = (reached_as(port.address, config.public),)
    return port


async def _add_health(server: grpc.aio.Server, service: str) -> health.aio.HealthServicer:
    """Add the health service; it reports `service`, the clocks, and the server as a whole, as serving."""
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in ("", _full_name(service), CLOCKS):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    return checks


async def _open_probes(listen: str) -> tuple[tuple[grpc.aio.Server, str], health.aio.HealthServicer]:
    """Bind the port for probes: it has the health service alone, and neither TLS nor members."""
    server = grpc.aio.server(options=server_options(SHORT_CALLS), maximum_concurrent_rpcs=PROBES_MAX)
    checks = await _add_health(server, "Coordinator")
    try:
        bound = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise cannot_listen(listen) from error
    return (server, f"{listen.rpartition(':')[0]}:{bound}"), checks


def _report_clocks(coordinator: Coordinator, checks: Sequence[health.aio.HealthServicer]) -> None:
    """Make the health service report `CLOCKS` as not serving while clocks differ."""
    status = health_pb2.HealthCheckResponse

    def report(agree: bool) -> None:
        for each in checks:
            coordinator.spawn(each.set(CLOCKS, status.SERVING if agree else status.NOT_SERVING))

    coordinator.clocks.on_told.append(report)


def _full_name(service: str) -> str:
    name: str = pb.DESCRIPTOR.services_by_name[service].full_name
    return name

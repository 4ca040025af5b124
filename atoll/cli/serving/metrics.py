"""The metrics of a serving process: `--metrics` of `atoll coordinator`, `atoll agent` and `atoll aggregator`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.client.agent import Agent
    from atoll.protocol.identity.keeper import Keeper
    from atoll.server.hosting.coordinator import Coordinator
    from atoll.server.ports import Ports
    from atoll.server.ranks.rank import Rank
    from atoll.telemetry.agent_spans import AgentSpans
    from atoll.telemetry.start import Telemetry


def opened(process: str, listen: str) -> "AbstractContextManager[Telemetry | None]":
    """Bind the port of the metrics, before anything runs; of a process without metrics nothing is imported.

    Raises:
        ConfigError: a package is missing, a variable is not valid, or the port is in use or not allowed.
    """
    if not listen:
        return nullcontext()
    from atoll.telemetry.instruments import Process
    from atoll.telemetry.start import Telemetry

    return Telemetry(Process(process), listen)


def serve_coordinator(telemetry: "Telemetry", coordinator: "Coordinator", ports: "Ports") -> None:
    """Serve the metrics of a coordinator, on other interfaces than loopback with mutual TLS."""
    from atoll.ground.address import is_loopback
    from atoll.ground.folder_id import folder_id
    from atoll.protocol.wire.channel import parse_address
    from atoll.server.identity.readers import Readers
    from atoll.telemetry.coordinator import CoordinatorReadings

    readers = None
    if not is_loopback(parse_address(telemetry.address)[0]):
        assert ports.keeper is not None, "settings keep the metrics of an insecure coordinator on loopback"
        readers = Readers(ports.keeper, coordinator.admission.is_revoked)
    telemetry.serve(CoordinatorReadings(coordinator, ports), folder_id(coordinator.state.path), readers)


def served_agent(telemetry: "Telemetry | None", spans: "AgentSpans | None") -> "Callable[[Agent], None]":
    """Return the function that serves the metrics of an agent, and sends its spans, once it has started."""

    def serve(agent: "Agent") -> None:
        if spans is not None:
            agent.phases.listeners.append(spans.note)
        if telemetry is not None:
            from atoll.telemetry.agent import AgentReadings

            telemetry.serve(AgentReadings(agent), agent.config.site)

    return serve


def serve_rank(telemetry: "Telemetry | None", rank: "Rank", keeper: "Keeper | None") -> None:
    """Serve the metrics of an aggregation rank."""
    if telemetry is not None:
        from atoll.telemetry.rank import RankReadings

        telemetry.serve(RankReadings(rank, keeper), str(rank.place.rank))

"""What happened in a simulated world: everything that the checks judge, and that a person reads when one fails."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.client import events as client
from atoll.protocol.vocabulary import ClientId, Digest, RoundId
from atoll.server import events as server
from atoll.server.record import RoundRecord
from atoll.server.run import RunMachine
from atoll.simulations.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Step:
    """One event that the coordinator decided about; it is in the history once it is on disk."""

    at: float
    event: server.Event
    effects: tuple[server.Effect, ...]


@dataclass(frozen=True, slots=True)
class AgentStep:
    """One event that an agent's session decided about."""

    at: float
    client_id: ClientId
    event: client.Event
    effects: tuple[client.Effect, ...]


@dataclass(frozen=True, slots=True)
class Remark:
    """Something else that happened, for the reader."""

    at: float
    who: str
    what: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """An acceptance that has left the coordinator."""

    at: float
    client_id: ClientId
    round_id: RoundId
    digest: Digest


@dataclass(frozen=True, slots=True)
class Restart:
    """The coordinator came back: which acknowledged updates its rebuilt state does not know although it should."""

    at: float
    num_steps: int
    forgotten: tuple[Acknowledged, ...]


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """A worker process is gone; its deadline is the last one that its agent had been told."""

    at: float
    client_id: ClientId
    key: client.Key
    deadline: float
    was_killed: bool
    stopped_at: float | None  # when it was asked to stop


@dataclass(slots=True)
class History:
    """One world from its first to its last instant."""

    seed: int
    scenario: Scenario
    steps: list[Step] = field(default_factory=list)
    agent_steps: list[AgentStep] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    acknowledged: list[Acknowledged] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    worker_ends: list[WorkerEnd] = field(default_factory=list)
    records: dict[RoundId, RoundRecord] = field(default_factory=dict)  # as they lie on disk at the end
    snapshot: tuple[int, str] | None = None  # number of steps before it, and the ledger
    left_in_spool: list[tuple[ClientId, client.Key]] = field(default_factory=list)
    machine: RunMachine | None = None
    ended_at: float = 0.0

    def effects(self) -> Iterator[tuple[Step, server.Effect]]:
        """Everything that the coordinator decided, in order."""
        return ((step, effect) for step in self.steps for effect in step.effects)

    def transcript(self, last: int | None = None) -> str:
        """The history for a person: one line for each event, its effects below it."""
        lines: list[tuple[float, int, str]] = []
        for step in self.steps:
            lines.append((step.at, 1, f"coordinator  {_short(step.event)}{_arrows(step.effects)}"))
        for agent_step in self.agent_steps:
            text = f"{agent_step.client_id:11}  {_short(agent_step.event)}{_arrows(agent_step.effects)}"
            lines.append((agent_step.at, 2, text))
        for remark in self.remarks:
            lines.append((remark.at, 0, f"{remark.who:11}  ** {remark.what}"))
        for number, told in enumerate(self.acknowledged):
            text = f"coordinator  acknowledges {told.client_id}'s update of round {told.round_id} ({number})"
            lines.append((told.at, 3, text))
        lines.sort(key=lambda line: line[:2])
        kept = lines if last is None else lines[-last:]
        body = "\n".join(f"{at:10.3f}  {text}" for at, _, text in kept)
        return f"{self.scenario}\n{body}"


def _arrows(effects: tuple[object, ...]) -> str:
    return "".join(f"\n{'':14}-> {_short(effect)}" for effect in effects)


def _short(value: object) -> str:
    text = repr(value)
    for noise in ("client_id=", "round_id=", "profile=Profile(num_examples=", "run_id='run', "):
        text = text.replace(noise, "")
    return text if len(text) <= 400 else text[:400] + "..."

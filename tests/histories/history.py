"""The history of a simulated world: the data of the checks, and the transcript for a person when one fails."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum

from atoll.client.session import events as client
from atoll.protocol.secure.messages import MemberKeys
from atoll.protocol.secure.terms import Terms
from atoll.protocol.vocabulary import ClientId, Digest, Fate, RoundId
from atoll.server.rounds import events as server
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from tests.histories.scenario import Scenario

Facts = dict[ClientId, tuple[Fate, Digest | None, RoundId | None, str]]
"""The fate of each invitation to a round, its accepted update, and which round's model has it or why none."""

HEXADECIMAL = re.compile(r"[0-9a-f]{65,}")
ALWAYS_THE_SAME = frozenset({"run_id", "task", "model_digest"})


@dataclass(slots=True)
class Step:
    """An event of the coordinator and its effects, added to the history once it is on disk."""

    at: float  # on the coordinator's clock, which may be set between two lives
    event: server.Event
    effects: tuple[server.Effect, ...]
    when: float  # on the world's clock


@dataclass(slots=True)
class AgentStep:
    """An event of an agent's session and its effects."""

    at: float  # on the agent's clock, which stands still while its machine sleeps
    client_id: ClientId
    event: client.Event
    effects: tuple[client.Effect, ...]
    when: float


@dataclass(slots=True)
class Remark:
    """A line about anything else, for the reader."""

    at: float
    who: str
    what: str


@dataclass(slots=True)
class Acknowledged:
    """An acceptance that the coordinator has sent."""

    at: float
    client_id: ClientId
    round_id: RoundId
    digest: Digest


@dataclass(frozen=True, slots=True)
class PartStep:
    """A step of the coordinator with the parts of an update."""

    at: float
    client_id: ClientId
    digest: Digest
    what: str
    index: int | None = None
    """The part; None: the step is about the update."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart of the coordinator, with the acknowledged updates that its rebuilt state lacks."""

    at: float
    num_steps: int
    forgotten: tuple[Acknowledged, ...]


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of a worker process, by its agent's clock; the deadline is the last one that the agent has received."""

    at: float
    client_id: ClientId
    key: client.Key
    deadline: float
    was_killed: bool
    stopped_at: float | None  # the time of the request to stop


@dataclass(slots=True)
class History:
    """The history of one world, from its beginning to its end."""

    seed: int
    scenario: Scenario
    steps: list[Step] = field(default_factory=list)
    agent_steps: list[AgentStep] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)  # numbers of faults, by the name of their fields
    remarks: list[Remark] = field(default_factory=list)
    acknowledged: list[Acknowledged] = field(default_factory=list)
    part_steps: list[PartStep] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    worker_ends: list[WorkerEnd] = field(default_factory=list)
    records: dict[RoundId, RoundRecord] = field(default_factory=dict)  # those on disk at the end
    known: dict[RoundId, Facts] = field(default_factory=dict)  # of the rounds that have ended, by the machine itself
    snapshot: Callable[[], tuple[int, Ledger]] = lambda: (0, Ledger())  # reads from disk: number of steps, ledger
    left_in_spool: list[tuple[ClientId, client.Key]] = field(default_factory=list)
    signs: dict[ClientId, float] = field(default_factory=dict)  # when the last byte of each client's transfers came
    machine: RunMachine | None = None
    ended_at: float = 0.0

    def effects(self) -> Iterator[tuple[Step, server.Effect]]:
        """Return all effects of the coordinator with their steps, in order."""
        return ((step, effect) for step in self.steps for effect in step.effects)

    def transcript(self, last: int | None = None) -> str:
        """Return the history for a person: a line for each event, with its effects below.

        Args:
            last: the number of last lines; None: all.
        """
        lines: list[tuple[float, int, str]] = []
        for step in self.steps:
            lines.append((step.when, 1, f"coordinator  {_short(step.event)}{_arrows(step.effects)}"))
        for agent_step in self.agent_steps:
            text = f"{agent_step.client_id:11}  {_short(agent_step.event)}{_arrows(agent_step.effects)}"
            lines.append((agent_step.when, 2, text))
        for remark in self.remarks:
            lines.append((remark.at, 0, f"{remark.who:11}  ** {remark.what}"))
        for number, one in enumerate(self.acknowledged):
            text = f"coordinator  acknowledges {one.client_id}'s update of round {one.round_id} ({number})"
            lines.append((one.at, 3, text))
        for part in self.part_steps:
            which = "" if part.index is None else f" part {part.index}"
            lines.append((part.at, 0, f"coordinator  {part.digest}{which} {part.what}"))
        lines.sort(key=lambda line: line[:2])
        shown = lines if last is None else lines[-last:]
        body = "\n".join(f"{at:10.3f}  {text}" for at, _, text in shown)
        return f"{self.scenario}\n\n{body}"


def facts_of(record: RoundRecord) -> Facts:
    """Return the facts of a record that no later event may lose."""
    return {c: (row.fate, row.digest, row.used_in, row.unused_because) for c, row in record.clients.items()}


def _arrows(effects: tuple[object, ...]) -> str:
    return "".join(f"\n{'':14}-> {_short(effect)}" for effect in effects)


def _short_of_sum(value: object) -> str | None:
    """Return a short form of what secure sums are made of; None: it is something else."""
    match value:
        case MemberKeys():
            return value.name
        case Terms():
            return f"attempt {value.attempt}, session {value.session}"
        case bytes():
            return f"{value.hex()[:8]}.."
        case int() if value >= 2**64:
            return f"{str(value)[:8]}.."
        case str() if HEXADECIMAL.fullmatch(value):
            return f"{value[:8]}.."
        case frozenset():
            return f"{{{', '.join(map(repr, sorted(value)))}}}"
        case Mapping():
            return f"{{{', '.join(f'{key}: {_short(each)}' for key, each in value.items())}}}"
    return None


def _short(value: object) -> str:
    """Return the `repr` of a value, without fields that have their default or are the same in the whole history.

    Of a member's keys it is the name, and of bytes, shares and messages of sums the beginning.
    """
    if (of_sum := _short_of_sum(value)) is not None:
        return of_sum
    if is_dataclass(value) and not isinstance(value, type):
        shown = (
            f"{part.name}={_short(content)}"
            for part in fields(value)
            if part.name not in ALWAYS_THE_SAME and (content := getattr(value, part.name)) != part.default
        )
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))})"
    return repr(value)

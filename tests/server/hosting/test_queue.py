"""The queue of a coordinator, with machines of runs of messages in the place of their drivers."""

from types import SimpleNamespace

from atoll.protocol.vocabulary import Digest, RunId, RunState
from atoll.server.exchanges.events import Event, ProgramEnded, ProgramStarted
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.hosting.coordinator import Coordinator
from atoll.server.rounds.events import PauseRequested, ResumeRequested, RunStarted, StopRequested


def queued(*events: Event) -> SimpleNamespace:
    """Return a run that was paused and resumed without room, after more events."""
    machine = ExchangeMachine(ExchangeRules())
    begun = (RunStarted(Digest("")), ProgramStarted(), PauseRequested("lunch"), ResumeRequested(wait=True))
    for event in (*begun, *events):
        machine.receive(event, 100.0)
    return SimpleNamespace(machine=machine, post=lambda event: machine.receive(event, 200.0))


def test_a_run_whose_program_ends_while_it_is_queued_leaves_the_queue() -> None:
    coordinator = object.__new__(Coordinator)
    coordinator.config = SimpleNamespace(max_runs=1)  # type: ignore[assignment]
    names = [RunId(name) for name in ("finished", "failed", "waiting", "later")]
    ends = [[ProgramEnded()], [ProgramEnded("KeyError: 'w'")], [], []]
    coordinator.runs = {name: queued(*events) for name, events in zip(names, ends, strict=True)}  # type: ignore[misc]
    coordinator.queue = [*names]
    assert coordinator.state_of(names[0]) is RunState.FINISHED
    coordinator._start_next()
    assert coordinator.state_of(names[2]) is RunState.RUNNING
    assert coordinator.queue == names[3:], "only one has room"
    coordinator.runs[names[2]].post(StopRequested("enough"))
    coordinator._start_next()
    assert (coordinator.state_of(names[3]), coordinator.queue) == (RunState.RUNNING, [])

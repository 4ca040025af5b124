"""The log lines of a run of messages: one for each exchange, and for each problem in it. Pure."""

from collections.abc import Iterator

from atoll.ground.printable import conclusion, count_of
from atoll.server.exchanges.events import Effects, Event, ProgramEnded, ProgramStarted, RecordExchange, StartProgram
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.rounds.events import ClientFailed, EndRun, FilesLost, PauseRun, ResumeRequested, UpdateRefused
from atoll.server.views.exchange_sentences import sentence
from atoll.server.views.narration import LINE_MAX, LogLine


def lines_of(machine: ExchangeMachine, event: Event, effects: Effects) -> Iterator[str]:
    """Yield the lines that an event adds to the log, with the machine after it."""
    yield from _of_event(machine, event)
    for effect in effects:
        match effect:
            case RecordExchange(number) if (exchange := machine.exchange(number)) is not None:
                yield sentence(exchange)
            case StartProgram():
                yield "the server program starts"
            case PauseRun(cause):
                yield f"the run is paused: {cause}"
            case EndRun(state, cause):
                yield f"the run is {state}: {cause}"


def _of_event(machine: ExchangeMachine, event: Event) -> Iterator[str]:
    match event:
        case ProgramStarted() if machine.ledger.num_exchanges:
            have = count_of(machine.ledger.num_exchanges, "exchange")
            yield f"the server program starts again; the journal has {have}"
        case ProgramEnded(is_dead=True):
            yield "the process of the server program has died"
        case ResumeRequested(wait):
            yield "the run is resumed" + (", and waits until there is room" if wait else "")
        case FilesLost(detail=detail):
            yield f"files are lost on the coordinator's disk: {detail[:LINE_MAX]}"
        case ClientFailed(client_id, message, reason, detail) | UpdateRefused(client_id, message, reason, detail):
            said = conclusion(detail)[:LINE_MAX]
            line = f"{client_id} gives no reply to message {message}: {reason}{f': {said}' if said else ''}"
            yield LogLine(line, site=client_id)

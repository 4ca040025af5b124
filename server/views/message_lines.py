"""The log lines of a run of messages: one for each exchange, and for each problem in it. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence

from atoll.ground.printable import conclusion, count_of
from atoll.protocol.vocabulary import ClientId, Fate
from atoll.server.exchanges.events import Effects, Event, ProgramEnded, ProgramStarted, RecordExchange, StartProgram
from atoll.server.exchanges.exchange import Exchange
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.rounds.events import ClientFailed, EndRun, FilesLost, PauseRun, ResumeRequested, UpdateRefused
from atoll.server.views.narration import LINE_MAX, LogLine

OF_FATES = {
    Fate.REPORTED: "replied",
    Fate.FAILED: "failed",
    Fate.REFUSED: "refused",
    Fate.LOST: "lost",
    Fate.STRAGGLER: "too late",
    Fate.RELEASED: "released",
}

NODES_MAX = 10
"""Largest number of nodes that are named."""


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


def nodes_in_words(nodes: Sequence[ClientId]) -> str:
    """Return the nodes that are connected as words."""
    listed = ", ".join(nodes[:NODES_MAX]) + (", ..." if len(nodes) > NODES_MAX else "")
    return f"{count_of(len(nodes), 'node is', 'nodes are')} connected" + (f" ({listed})" if nodes else "")


def sentence(exchange: Exchange) -> str:
    """Return an exchange as a sentence: the messages sent, and how it ended."""
    kinds = ", ".join(sorted({one.message.kind for one in exchange.sent}))
    sent = f"exchange {exchange.number}: {count_of(len(exchange.sent), 'message')} ({kinds})"
    if exchange.is_open:
        return f"{sent} sent"
    fates = Counter(one.fate for one in exchange.sent)
    ends = ", ".join(f"{fates[fate]} {text}" for fate, text in OF_FATES.items() if fates[fate])
    seconds = (exchange.closed_at or exchange.opened_at) - exchange.opened_at
    return f"{sent} closed after {seconds:.2f} s ({exchange.close_reason}): {ends}"

"""The views of a run of messages in JSON types: its exchanges and its nodes, from its records and its journal."""

from collections import Counter
from typing import Any

from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import TERMINAL, RunState
from atoll.server.exchanges.exchange import Exchange
from atoll.server.exchanges.ledger import Ledger
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.journal.exchanges import read_exchanges, recover_exchanges
from atoll.server.journal.rows import RunRow
from atoll.server.rounds.waiting import TOO_FEW, Missing, Wait
from atoll.server.views.exchange_sentences import NODES_MAX, exchange_document, nodes_in_words, sentence
from atoll.server.views.history import History

Document = dict[str, Any]

NEWEST = 5
"""Number of the newest exchanges described by sentences in the document of a run."""


def exchanges_of(
    history: History, row: RunRow, *, only: int = 0, after: int = 0
) -> tuple[dict[int, Exchange], ExchangeMachine]:
    """Return the exchanges that the journal has, by number, and the machine after its last entry.

    Args:
        history: the history of the state directory.
        row: the run.
        only: the wanted exchange; 0: all.
        after: the exchange after which they begin.

    Raises:
        StoreCorrupted: the journal cannot be read.
    """
    numbers = [only] if only else None
    recovered, closed = history.read(
        lambda connection: (
            recover_exchanges(connection, row.run_id),
            read_exchanges(connection, row.run_id, numbers, after=after),
        )
    )
    machine = recovered.replayed(ExchangeMachine(row.config.exchange_rules, recovered.ledger))
    opened = {number: one for number, one in machine.ledger.open.items() if only in (0, number) and number > after}
    return dict(sorted({**closed, **opened}.items())), machine


def details(history: History, row: RunRow) -> Document:
    """Return the additions to the facts of the run's row in its document: its newest exchanges, and its wait."""
    newest = max(0, (history.newest_record(row.run_id) or 0) - NEWEST)
    found, machine = exchanges_of(history, row, after=newest)
    return {
        "metrics": {},
        "unmeasured": [],
        "best": None,
        "undecided": [],
        "pausing": machine.ledger.pausing,
        "waiting": _wait(history, machine, row.config.round.min_available),
        "name_conflicts": [],
        "exchanges": machine.ledger.num_exchanges,
        "sentences": [sentence(exchange) for exchange in [*found.values()][-NEWEST:]],
    }


def open_exchanges(history: History, row: RunRow) -> list[Exchange]:
    """Return the open exchanges in order."""
    found = exchanges_of(history, row, after=history.newest_record(row.run_id) or 0)[1].ledger.open
    return [found[number] for number in sorted(found)]


def exchange(history: History, row: RunRow, number: int) -> Document:
    """Return an exchange with its messages and sentences; without a number the newest one.

    Raises:
        LookupError: there is no exchange, or its record was deleted.
    """
    newest = history.newest_record(row.run_id) or 0
    found, machine = exchanges_of(history, row, only=number, after=0 if number else newest - 1)
    if not found and not machine.ledger.num_exchanges:
        raise LookupError(f"run {row.run_id} has had no exchange yet")
    if not found:
        last = machine.ledger.num_exchanges
        raise LookupError(f"run {row.run_id} has no record of an exchange {number} (the newest one is {last})")
    return exchange_document(found[max(found)])


def clients(history: History, row: RunRow) -> list[Document]:
    """Return a row for each node: the run's facts about a client (`attendance`)."""
    found, machine = exchanges_of(history, row)
    ledger, is_attended = machine.ledger, history.coordinator() is not None
    sent = [one for each in found.values() for one in each.sent]
    asked = Counter(one.message.client_id for one in sent)
    replied = Counter(one.message.client_id for one in sent if one.reply is not None)
    newest = {one.message.client_id: one for one in sent if one.reason}
    rows = []
    for client_id, node in sorted(ledger.membership.members.items()):
        failed, is_connected = newest.get(client_id), node.session is not None and is_attended
        rows.append(
            {
                "client": client_id,
                "connected": is_connected,
                "available": is_connected and ledger.is_open,
                "why_not": "" if is_connected else "it is not connected",
                "software": node.software,
                "last_failure": None
                if failed is None
                else {"reason": failed.reason, "detail": failed.detail, "at": failed.ended_at},
                "invited": asked[client_id],
                "used": replied[client_id],
            }
        )
    return rows


def ledger_of(history: History, row: RunRow) -> Ledger:
    """Return the current state of a run of messages."""
    return exchanges_of(history, row, after=history.newest_record(row.run_id) or 0)[1].ledger


def wait_of_program(ledger: Ledger, min_available: int, since: float) -> Wait | None:
    """Return the wait of a running program for its nodes: for the first ones, or after a restart; None: it is working.

    Args:
        ledger: the state of the run.
        min_available: the number of nodes for which its first query waits.
        since: the start of a wait for the first nodes [s since the epoch].
    """
    if ledger.state is not RunState.RUNNING:
        return None
    lacks = not ledger.looks and len(ledger.membership.present) < min_available
    if not ledger.awaited and not lacks:
        return None
    away = sorted(ledger.awaited or set(ledger.membership.members).difference(ledger.membership.present))
    missing = tuple(Missing(client_id, None, "not connected") for client_id in away)
    return Wait(TOO_FEW, ledger.awaited_since or since, missing)


def _wait(history: History, machine: ExchangeMachine, min_available: int) -> str:
    if machine.ledger.state in TERMINAL or machine.ledger.state is RunState.PAUSED:
        return ""
    if history.coordinator() is None:
        return "no coordinator holds the state directory: start it, and the run continues"
    return what_a_program_waits_for(machine.ledger, min_available)


def what_a_program_waits_for(ledger: Ledger, min_available: int) -> str:
    """Return what the server program of a run waits for, or does.

    Args:
        ledger: the state of the run.
        min_available: the number of nodes for which its first query waits.
    """
    if waiting := sorted({one.message.client_id for each in ledger.open.values() for one in each.waiting}):
        return f"it waits for replies of {', '.join(waiting[:NODES_MAX])}"
    connected = nodes_in_words(ledger.membership.present)
    if not ledger.looks and len(ledger.membership.present) < min_available:
        few = count_of(min_available, "is", "are")
        return f"its server program gets no nodes before {few} connected (round.min_available); {connected}"
    if ledger.looks and ledger.looks[-1].num_exchanges == ledger.num_exchanges:
        return f"its server program works, or waits for more nodes; {connected}; its output is in program.log"
    return "its server program works"

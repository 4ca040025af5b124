"""The views of a run of messages in JSON types: its exchanges and its nodes, from a replay of its journal."""

from collections import Counter
from typing import Any

from atoll.protocol.vocabulary import TERMINAL
from atoll.server.exchanges.exchange import Exchange
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.journal.exchanges import replay_exchanges
from atoll.server.journal.journal import RunRow
from atoll.server.views.history import History
from atoll.server.views.message_lines import sentence

Document = dict[str, Any]


def machine_of(history: History, row: RunRow) -> ExchangeMachine:
    """Return the machine of a run of messages after the last entry of its journal; raises StoreCorrupted."""
    rules = row.config.exchange_rules
    return history.read(lambda connection: replay_exchanges(connection, row.run_id, rules))[0]


def details(history: History, row: RunRow) -> Document:
    """Return what the document of a run has beyond the facts in its row: its exchanges, and what it waits for."""
    machine = machine_of(history, row)
    return {
        "metrics": {},
        "unmeasured": [],
        "best": None,
        "pausing": "",
        "waiting": _wait(history, machine),
        "name_conflicts": [],
        "exchanges": [exchange_document(exchange) for exchange in machine.ledger.exchanges.values()],
    }


def clients(history: History, row: RunRow) -> list[Document]:
    """Return a row for each node, with the keys of a client's row of any run."""
    ledger, is_attended = machine_of(history, row).ledger, history.coordinator() is not None
    sent = [one for exchange in ledger.exchanges.values() for one in exchange.sent]
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
                "seen_at": None,
                "software": node.software,
                "last_failure": None
                if failed is None
                else {"reason": failed.reason, "detail": failed.detail, "at": failed.ended_at},
                "evaluates": True,
                "num_examples": 0,
                "label": "",
                "download_seconds": None,
                "train_seconds": None,
                "upload_seconds": None,
                "invited": asked[client_id],
                "used": replied[client_id],
                "name_conflict": "",
            }
        )
    return rows


def exchange_document(exchange: Exchange) -> Document:
    """Return an exchange with its messages, in JSON types."""
    return {
        "exchange": exchange.number,
        "opened_at": exchange.opened_at,
        "closed_at": exchange.closed_at,
        "close_reason": exchange.close_reason,
        "sentence": sentence(exchange),
        "messages": [
            {
                "number": one.number,
                "client": one.message.client_id,
                "kind": one.message.kind,
                "group": one.message.group,
                "content": one.message.content,
                "num_bytes": one.message.num_bytes,
                "fate": one.fate,
                "reply": one.reply,
                "reply_bytes": one.num_bytes,
                "reason": one.reason,
                "detail": one.detail,
            }
            for one in exchange.sent
        ],
    }


def _wait(history: History, machine: ExchangeMachine) -> str:
    ledger = machine.ledger
    if ledger.state in TERMINAL:
        return ""
    if history.coordinator() is None:
        return "no coordinator holds the state directory: start it, and the run goes on"
    waiting = sorted({one.message.client_id for exchange in ledger.open.values() for one in exchange.waiting})
    return f"it waits for replies of {', '.join(waiting[:10])}" if waiting else "its server program works"

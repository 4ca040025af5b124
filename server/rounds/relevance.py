"""The relevance of clients' messages: a message that cannot change a run's machine is not made an event. Pure."""

from atoll.protocol.vocabulary import ClientId, Fate, RoundId, Version
from atoll.server.rounds.events import Update
from atoll.server.rounds.run_machine import RunMachine


def is_failure_news(machine: RunMachine, client_id: ClientId, round_id: RoundId) -> bool:
    """Return whether the machine still records the reason why a client gives up a round."""
    record, open_round = machine.record_of(round_id), machine.round
    client = record.clients.get(client_id) if record is not None else None
    if client is None or client.digest is not None or client.reason:
        return False
    if open_round is not None and open_round.record is record:
        return client.fate in (Fate.WAITING, Fate.JOINED)
    return client.fate in (Fate.WAITING, Fate.STRAGGLER, Fate.RELEASED)


def is_first_upload(machine: RunMachine, update: Update) -> bool:
    """Return whether the machine awaits this update and does not know yet that its upload has begun."""
    record = machine.record_of(update.round_id)
    client = record.clients.get(update.client_id) if record is not None else None
    if client is None or client.upload_begun_at is not None:
        return False
    if machine.rules.policy.is_asynchronous:
        return machine.invitations.is_training(update.client_id, update.round_id)
    return machine.round is not None and machine.round.record is record


def is_asked(machine: RunMachine, client_id: ClientId, version: Version) -> bool:
    """Return whether the machine awaits a client's evaluation of a version."""
    evaluation = machine.ledger.evaluation
    return evaluation is not None and evaluation.version == version and evaluation.is_waiting_for(client_id)

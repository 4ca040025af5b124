"""What a run's machine still wants to hear: of what changes nothing nobody makes an event. Pure."""

from atoll.protocol.vocabulary import ClientId, Fate, RoundId, Version
from atoll.server.rounds.events import Update
from atoll.server.rounds.run_machine import RunMachine


def is_failure_news(machine: RunMachine, client_id: ClientId, round_id: RoundId) -> bool:
    """Whether it matters why a client gives up a round."""
    record, open_round = machine.record_of(round_id), machine.round
    client = record.clients.get(client_id) if record is not None else None
    if client is None or client.digest is not None or client.reason:
        return False
    if open_round is not None and open_round.record is record:
        return client.fate is Fate.WAITING
    return client.fate in (Fate.WAITING, Fate.STRAGGLER, Fate.RELEASED)


def is_first_upload(machine: RunMachine, update: Update) -> bool:
    """Whether the machine does not know yet that an update that it waits for is on its way."""
    record = machine.record_of(update.round_id)
    client = record.clients.get(update.client_id) if record is not None else None
    if client is None or client.upload_begun_at is not None:
        return False
    if machine.rules.policy.is_asynchronous:
        return machine.invitations.is_training(update.client_id, update.round_id)
    return machine.round is not None and machine.round.record is record


def is_asked(machine: RunMachine, client_id: ClientId, version: Version) -> bool:
    """Whether a client's measure of a version is waited for."""
    evaluation = machine.ledger.evaluation
    return evaluation is not None and evaluation.version == version and evaluation.is_waiting_for(client_id)

"""A run whose folder is given another number of rounds: more than it was begun with, or fewer than are still to come.

It may, where the outcome is that of a run with so many rounds from the beginning. What knows of the end: the last
version is measured whatever `evaluation` says; what is late for the last round is turned away; near its end an
asynchronous run turns away what no commit would follow. And what clients were at when the run ended is lost.
"""

from collections.abc import Iterator

from atoll.protocol.vocabulary import Fate, RunState
from atoll.server.config.run import RunConfig
from atoll.server.rounds.ledger import Ledger

AT_REST = frozenset({Fate.REPORTED, Fate.FAILED, Fate.REFUSED})
"""Who has one of these fates was done with the round when it ended."""


def faults_of_rounds(ledger: Ledger, before: int, config: RunConfig) -> Iterator[str]:
    """Why a run that stands there cannot end after `config.rounds` rounds.

    Args:
        ledger: of the run.
        before: how many rounds it was to have.
        config: with the other number, and otherwise the run's.
    """
    if config.rounds <= ledger.version:
        yield f"{ledger.version} are committed already; allowed: more than that"
    if config.round.is_asynchronous:
        yield f"it was begun for {before}, and an asynchronous run turns away what comes too late for its last round"
    elif ledger.version >= before:
        yield from _faults_of_a_finished(ledger, before, config)


def _faults_of_a_finished(ledger: Ledger, before: int, config: RunConfig) -> Iterator[str]:
    if config.round.late == "next_round":
        yield f"it has ended after {before}, and turned away what was late, which round {before + 1} would have taken"
    evaluation = config.evaluation
    for name, every in (("server_every", evaluation.server_every), ("clients_every", evaluation.clients_every)):
        if every and before % every:
            yield f"it has ended after {before}, and measured that version only for it (evaluation.{name} is {every})"
    invited = [invitation for record in ledger.past.values() for invitation in record.clients.items()]
    if busy := sorted({name for name, client in invited if client.fate not in AT_REST}):
        yield f"in its last rounds clients were at work when a round ended, and that is lost: {', '.join(busy[:5])}"


def reopen(ledger: Ledger, rounds: int) -> None:
    """Let a run that has committed all its rounds go on when it is to have more; any other stays as it is."""
    if ledger.state is RunState.FINISHED and ledger.version < rounds:
        ledger.state, ledger.cause, ledger.is_round_due = RunState.RUNNING, "", True

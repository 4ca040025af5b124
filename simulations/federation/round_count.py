"""A change of the number of rounds of an existing run.

The change is allowed if the outcome equals that of a run with the new number from the beginning. It is not if the
planned end has already had an effect: the last version is measured regardless of `evaluation`; an update that is late
for the last round is refused; near its end an asynchronous run refuses updates that no commit would include; work in
progress at the end of the run is lost; a schedule ends with the run, so earlier rounds had other values.
"""

from collections.abc import Iterator, Mapping

from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import Fate, RunState
from atoll.server.config.run import RunConfig
from atoll.server.rounds.ledger import Ledger

AT_REST = frozenset({Fate.REPORTED, Fate.FAILED, Fate.REFUSED})
"""Fates of clients that were idle when the round ended."""


Differences = Mapping[str, tuple[str | None, str | None]]
"""Settings by name with the values of the run in the folder and of the wanted one, as JSON; None: it has none."""


def faults_of_rounds(ledger: Ledger, before: int, config: RunConfig, ends: Differences) -> Iterator[str]:
    """Yield the reasons why a run cannot end after `config.rounds` rounds.

    Args:
        ledger: the ledger of the run.
        before: its previous number of rounds.
        config: its settings, with the new number of rounds.
        ends: the rounds in which schedules reach their end, where they differ.
    """
    if config.rounds <= ledger.version:
        yield (
            f"{count_of(ledger.version, 'round is', 'rounds are')} committed already; allowed: "
            f"more than {ledger.version}"
        )
    if config.round.is_asynchronous:
        yield f"it began with {before}, and an asynchronous run refuses updates that are too late for its last round"
    elif ledger.version >= before:
        yield from _faults_of_finished_run(ledger, before, config)
    for key, (there, _) in ends.items():
        _, table, name, _ = key.split(".")
        schedule = getattr(config.schedule, table)[name]
        if ledger.version > schedule.same_until:
            yield (
                f"schedule.{table}.{name} reached its end in round {there}, and would now do so in round "
                f"{schedule.rounds or config.rounds}, so rounds {schedule.same_until + 1} to {ledger.version} had "
                f"other values; --set {key}={there} keeps them"
            )


def _faults_of_finished_run(ledger: Ledger, before: int, config: RunConfig) -> Iterator[str]:
    if config.round.late == "next_round":
        yield f"it ended after {before} and refused late updates that round {before + 1} would have taken"
    evaluation = config.evaluation
    for name, every in (("server_every", evaluation.server_every), ("clients_every", evaluation.clients_every)):
        if every and before % every:
            yield f"it ended after {before} and measured that version as its last one (evaluation.{name} is {every})"
    invited = [invitation for record in ledger.past.values() for invitation in record.clients.items()]
    if busy := sorted({name for name, client in invited if client.fate not in AT_REST}):
        yield f"work that clients had in progress at the end of its last rounds is lost: {', '.join(busy[:5])}"


def reopen(ledger: Ledger, rounds: int) -> None:
    """Reopen a finished run if its number of rounds has grown; leave all others unchanged, also after an early stop."""
    if ledger.state is RunState.FINISHED and ledger.version < rounds and not ledger.early_stop:
        ledger.state, ledger.cause, ledger.is_round_due = RunState.RUNNING, "", True

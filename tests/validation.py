"""The check of every machine's invariants after every event, in the processes of the tests."""

import functools
import sys
from typing import Any

MACHINES = {"atoll.server.rounds.run_machine": "RunMachine", "atoll.server.exchanges.machine": "ExchangeMachine"}
MANY = 300
"""Number of members above which a machine is checked at the ends of rounds and of the run alone."""

ENDS = frozenset({"Commit", "Abandon", "EndRun"})


def validate_machines() -> None:
    """Let each class of machine that is imported check itself after each event; a second call changes nothing."""
    for module, name in MACHINES.items():
        if module in sys.modules:
            _validate(getattr(sys.modules[module], name))


def _validate(machine: Any) -> None:
    receive = machine.receive
    if hasattr(receive, "__wrapped__"):
        return

    @functools.wraps(receive)
    def validated(self: Any, event: Any, now: float) -> Any:
        effects = receive(self, event, now)
        if len(self.ledger.membership.members) <= MANY or any(type(one).__name__ in ENDS for one in effects):
            self.validate()
        return effects

    machine.receive = validated

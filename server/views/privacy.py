"""The guarantee of what a run has released, as views, exports and reports have it."""

from dataclasses import asdict
from typing import Any

from atoll.server.rounds.run_machine import RunMachine

NOTE = "privacy"
"""The entry of an exported model's metadata that has the sentence of the guarantee."""


def guarantee_of(machine: RunMachine) -> dict[str, Any] | None:
    """Return the guarantee of what a run has released so far, in plain values; None: it has none."""
    rules, membership = machine.rules.privacy, machine.ledger.membership
    if rules is None:
        return None
    guarantee = rules.guarantee(membership.most_spent, membership.most_uses)
    return {
        **asdict(guarantee),
        "sentence": guarantee.sentence,
        "epsilon_max": rules.epsilon,
        "participations_max": rules.participations_max,
        "clients": len(membership.members),
        "clients_with_budget": membership.num_with_budget,
    }

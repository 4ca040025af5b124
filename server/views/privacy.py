"""The guarantee of what a run has released, as views, exports and reports have it."""

from dataclasses import asdict
from typing import Any

from atoll.ground.printable import count_of
from atoll.server.rounds.buffer_round import Buffer
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.waiting import named

NOTE = "privacy"
"""The entry of an exported model's metadata that has the sentence of the guarantee."""


def guarantee_of(machine: RunMachine, num_members: int | None = None) -> dict[str, Any] | None:
    """Return the guarantee of what a run has released so far, in plain values; None: it has none.

    Args:
        machine: the machine of the run, perhaps without its members.
        num_members: their number; None: the machine has them.
    """
    rules, membership = machine.rules.privacy, machine.ledger.membership
    if rules is None:
        return None
    num = len(membership.members) if num_members is None else num_members
    guarantee = rules.guarantee(membership.most_spent, membership.most_uses)
    return {
        **asdict(guarantee),
        "sentence": guarantee.sentence,
        "epsilon_max": rules.epsilon,
        "participations_max": rules.participations_max,
        "clients": num,
        "clients_with_budget": num - membership.num_spent,
        "waiting": waiting_of(machine),
    }


def waiting_of(machine: RunMachine) -> str:
    """Return which updates are charged and in no fold yet, as a sentence; empty: none, as in a run with cohorts."""
    if machine.rules.privacy is None or not machine.rules.policy.is_asynchronous:
        return ""
    round_ = machine.round
    in_buffer = [*round_.held] if isinstance(round_, Buffer) and round_.is_open else []
    if not (waiting := [*in_buffer, *machine.ledger.waiting]):
        return ""
    number, clients = count_of(len(waiting), "accepted update"), named({update.client_id for update in waiting})
    return f"{number} in no version yet, of {clients}: charged, and no end of the run refunds that"

"""The audit log's entries about the effects of a run. Pure."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import Digest, RunId
from atoll.server.audit.actions import Action
from atoll.server.rounds.events import Abandon, AuditCharge, Commit, Effect, EndRun
from atoll.server.rounds.record import ChargeRecord
from atoll.server.rounds.run_machine import RunMachine


class Entry(NamedTuple):
    """Arguments of `AuditLog.record`."""

    action: Action
    object_: str
    outcome: str
    digests: Mapping[str, str]


def entries_of(run_id: RunId, effects: Iterable[Effect]) -> Iterator[Entry]:
    """Yield one entry for each round that was charged or has ended, and one for the end of the run."""
    for effect in effects:
        match effect:
            case Commit(round_id, version, model_digest, used):
                what = f"version {version} of {count_of(len(used), 'update')}"
                digests = {"model": model_digest, "updates": digest_of_updates(used)}
                yield Entry(Action.ROUND_COMMIT, f"{run_id} round {round_id}", what, digests)
            case AuditCharge(rounds, charge):
                clients = count_of(charge.clients, "client")
                yield Entry(Action.PRIVACY_CHARGE, f"{run_id} {rounds}", f"{clients}; {_spent(charge)}", {})
            case Abandon(round_id, reason):
                yield Entry(Action.ROUND_ABANDON, f"{run_id} round {round_id}", str(reason), {})
            case EndRun(state, cause):
                yield Entry(Action.RUN_END, run_id, f"{state}: {cause}", {})
            case _:
                pass


def spent_of(machine: RunMachine) -> str:
    """Return what the most used client of a recovered run has spent, after a semicolon; empty: it is not private.

    The line of a charge is missing if the coordinator was killed between the journal and the audit log.
    """
    if (rules := machine.rules.privacy) is None:
        return ""
    membership = machine.ledger.membership
    return f"; {_spent(rules.charged(0, membership.most_spent, membership.most_uses))}"


def _spent(charge: ChargeRecord) -> str:
    spent = f"epsilon {charge.epsilon:.6g} of {charge.epsilon_max:g} at delta {charge.delta:g}"
    return f"the most used in {count_of(charge.uses, 'sum')}: {spent}"


def digest_of_updates(used: Iterable[Digest]) -> str:
    """Return the SHA-256 [hex] over the sorted digests [hex] of a round's updates, each followed by a newline."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in sorted(used)).encode()).hexdigest()

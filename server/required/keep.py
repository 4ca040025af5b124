"""The files of a run that must be kept, by its machine alone: for the retention of a coordinator or a simulation."""

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.protocol.vocabulary import TERMINAL, Digest, Version
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.run_machine import RunMachine


@dataclass(frozen=True, slots=True)
class Keep:
    """Files to keep, from the state after the event that ended a round."""

    seq: int  # the sequence number of that event
    at: float  # its time [s since the epoch]
    version: Version
    updates: frozenset[Digest]
    versions: frozenset[Version]
    oldest_base: Version  # the oldest base version of an update that may still count
    is_over: bool  # whether the run has ended: partial uploads will not be completed
    sites: int  # number of newest versions whose metrics of single sites are kept

    @classmethod
    def after(cls, seq: int, machine: RunMachine, policy: StragglerPolicy) -> "Keep":
        """Collect what the machine still refers to, and the versions that a late update may name as its base.

        The same event may have ended one round and opened the next.
        """
        ledger = machine.ledger
        updates = [*ledger.carried.values(), *ledger.waiting, *(machine.round.held if machine.round else ())]
        stalest = max(0, ledger.version - policy.max_staleness)
        return cls(
            seq,
            ledger.now,
            ledger.version,
            frozenset(update.digest for update in updates),
            frozenset((*_wanted(ledger), *map(Version, range(stalest, ledger.version)))),
            Version(stalest) if policy.takes_stale else ledger.version,
            ledger.state in TERMINAL,
            machine.rules.keep_sites,
        )


def _wanted(ledger: Ledger) -> Iterator[Version]:
    """Yield the best version, and versions that may become it."""
    yield from ledger.unevaluated
    yield from (effect.version for effect in ledger.computing)
    if ledger.best is not None:
        yield ledger.best.version

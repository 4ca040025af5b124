"""The restoration of a state directory from a backup, and the newest published round of each private run before it.

A backup does not know the rounds after it, nor their charges. So the next start needs the newest published round of
each open private run, and charges all its clients for every round until then. Where the clients add the noise, it needs
the newest round that had begun: the coordinator may have opened a sum of it without a version.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.ground.printable import instead_of
from atoll.protocol.identity.clock_hint import instant
from atoll.protocol.vocabulary import TERMINAL, RoundId, RunId
from atoll.server.errors import OperatorError, StoreCorrupted
from atoll.server.hosting.recovering import Replayed
from atoll.server.rounds.run_machine import RunMachine

RESTORED = "restored.json"
ROUND_MAX = 10**9
UNNAMED = ""
"""Key of a round that is named without its run."""


@dataclass(frozen=True, slots=True)
class Restoration:
    """Restoration of a state directory: its id, and the time of the backup [s since the epoch]."""

    id: str
    made_at: float

    @classmethod
    def of(cls, state: Path) -> "Restoration | None":
        """Return the newest restoration of a state directory; None: it is not a restored one.

        Raises:
            StoreCorrupted: its note cannot be read.
        """
        path = state / RESTORED
        try:
            found = json.loads(path.read_bytes())
            return cls(str(found["id"]), float(found["made_at"]))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            again = "restore the backup again, into a new folder"
            raise StoreCorrupted(f"{path} is damaged ({error!r}): {again}") from error

    def fault_of(self, run_id: RunId, machine: RunMachine) -> str:
        """Return why a private run cannot continue before its newest published round is named; empty: it can."""
        if machine.ledger.restoration == self.id:
            return ""
        which, newest = "the rounds that were published since", "the newest published round"
        none = f"{machine.newest_released}, if none was"
        if _is_by_attempt(machine):
            which, newest = "the rounds that have begun since", "the newest round that has begun, published or not"
            none = f"{machine.newest_released}, if none has"
        return (
            f"run {run_id} is private, and this state was restored from a backup of {instant(self.made_at)}, which "
            f"does not know {which}, nor their charges: start the coordinator once with "
            f"--published {run_id}=ROUND, {newest} ({none})"
        )


def _is_by_attempt(machine: RunMachine) -> bool:
    """Return whether each attempt at a sum of a private run is charged, as the clients add the noise."""
    return machine.rules.privacy is not None and machine.rules.privacy.noise_by == "clients"


def private_runs(runs: Iterable[Replayed]) -> dict[RunId, RunMachine]:
    """Return the runs with differential privacy."""
    machines = ((run.row.run_id, run.machine) for run in runs)
    return {
        run_id: machine
        for run_id, machine in machines
        if isinstance(machine, RunMachine) and machine.rules.privacy is not None
    }


def published_of(
    restoration: Restoration | None, runs: Sequence[Replayed], named: Mapping[str, int]
) -> dict[RunId, RoundId]:
    """Return the newest published rounds with which private runs continue after a restoration.

    Args:
        restoration: of the state directory; None: it is not a restored one.
        runs: all runs of the state directory.
        named: the rounds that the operator has named, by run, or one round under `UNNAMED` for the only private run.

    Raises:
        OperatorError: a round is lacking, too small, or of no private run: all faults, a line each.
    """
    private = private_runs(runs)
    if restoration is None and named:
        raise OperatorError("--published: this state was not restored from a backup: leave the option out")
    if restoration is None:
        return {}
    found, faults = _by_run(private, named)
    faults += _faults_of_rounds(private, found)
    if not faults:
        lacking = (id for id in private if id not in found and private[id].ledger.state not in TERMINAL)
        faults += filter(None, (restoration.fault_of(run_id, private[run_id]) for run_id in lacking))
    if faults:
        raise OperatorError("\n".join(faults))
    return {run_id: number for run_id, number in found.items() if private[run_id].ledger.restoration != restoration.id}


def _by_run(private: Mapping[RunId, RunMachine], named: Mapping[str, int]) -> tuple[dict[RunId, RoundId], list[str]]:
    """Return the named rounds by run, and the faults of their runs."""
    found, faults = dict[RunId, RoundId](), list[str]()
    for name, number in named.items():
        open_runs = [run_id for run_id, machine in private.items() if machine.ledger.state not in TERMINAL]
        if name == UNNAMED and len(open_runs) != 1:
            among = ", ".join(f"{run_id}=ROUND" for run_id in open_runs) or "none, as no open run is private"
            faults.append(f"--published: got {number} without a run; allowed: {among}")
        elif name != UNNAMED and name not in private:
            faults.append(f"--published: there is no private run {name!r}{instead_of(name, private)}")
        else:
            found[RunId(name or open_runs[0])] = RoundId(number)
    return found, faults


def _faults_of_rounds(private: Mapping[RunId, RunMachine], found: Mapping[RunId, RoundId]) -> Iterator[str]:
    """Yield the faults of rounds that no run can have published last."""
    for run_id, number in found.items():
        least, what = private[run_id].newest_released, "" if _is_by_attempt(private[run_id]) else "a version of "
        if not least <= number <= ROUND_MAX:
            known = f"the backup itself has {what}round {least}" if number < least else "no run has as many"
            yield f"--published {run_id}={number}: {known}; allowed: {least} to {ROUND_MAX}"

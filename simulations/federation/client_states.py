"""The states of simulated clients between rounds: control variates, local layers, residuals of the codec.

    <client>.own.<round>         state after the training for that round; current once its update is in a model
    <client>.residual.<round>    residual of the codec for that round's update; current once the update is accepted

The states are files, because the product of clients and model size exceeds memory. An interrupted run resumes from a
snapshot, which checks their digests, and repeats later trainings: later files must not exist.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from atoll.client.disk.client_state import KEEP
from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.task.arrays import Arrays
from atoll.tensors import safetensors_file

_NAME = re.compile(r"(\d+)\.(own|residual)\.(\d+)\.safetensors")


class ClientStates:
    """Files of the client states in one folder, named by a client's number: its name may not be a valid file name.

    Args:
        folder: the folder of the files.
        clients: the number of each client.
        named: the files of the snapshot from which the run resumes, which exist; all others are deleted.
    """

    def __init__(self, folder: Path, clients: Mapping[ClientId, int], named: Collection[str] = ()) -> None:
        self._folder, self._numbers = folder, clients
        self._rounds: dict[tuple[int, str], list[RoundId]] = {}
        self._named = frozenset[str](), frozenset(named)
        """Files of the last two snapshots."""
        self._written: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.name not in self._named[1]:
                path.unlink()
        for name in named:
            self._restore(name)

    def _restore(self, name: str) -> None:
        parts = _NAME.fullmatch(name)
        assert parts is not None
        rounds = self._rounds.setdefault((int(parts[1]), parts[2]), [])
        rounds.append(RoundId(int(parts[3])))
        rounds.sort()

    def named(self) -> list[str]:
        """Return the files of the current state for a snapshot; they are kept until this is called twice more."""
        names = frozenset(
            _name(number, kind, round_id) for (number, kind), rounds in self._rounds.items() for round_id in rounds
        )
        for name in self._named[0] - self._named[1] - names:
            (self._folder / name).unlink(missing_ok=True)
        self._named = self._named[1], names
        return sorted(names)

    def written(self) -> set[str]:
        """Return the files that were written since the last call."""
        written, self._written = self._written, set()
        return written

    @property
    def is_used(self) -> bool:
        """Return whether any client has a state."""
        return bool(self._rounds)

    def find(self, client: ClientId, counted_round: RoundId) -> Arrays | None:
        """Return the state after the training for the last round that counted; None: there is none."""
        is_stored = counted_round in self._rounds.get((self._numbers[client], "own"), ())
        return safetensors_file.read(self._path(client, "own", counted_round)) if is_stored else None

    def store(self, client: ClientId, round_id: RoundId, counted_round: RoundId, state: Arrays) -> None:
        """Store the state after a training, and drop the states of rounds before the last counted one."""
        path = self._path(client, "own", round_id)
        safetensors_file.write(path, state, durable=False)
        self._written.add(path.name)
        rounds = {*self._rounds.get((self._numbers[client], "own"), ()), round_id}
        waiting = sorted(number for number in rounds if number > counted_round)[-KEEP:]
        self._keep_only(client, "own", rounds, {counted_round, *waiting})

    def residual(self, client: ClientId) -> Path | None:
        """Return the residual of the last accepted update; None: there is none."""
        rounds = self._rounds.get((self._numbers[client], "residual"))
        return self._path(client, "residual", max(rounds)) if rounds else None

    def staged_residual(self, client: ClientId, round_id: RoundId) -> Path:
        """Return the path of an update's residual until the update is answered."""
        return self._path(client, "residual", round_id).with_suffix(".staged")

    def settle_residual(self, client: ClientId, round_id: RoundId, *, accepted: bool) -> None:
        """Make the residual of an accepted update the only current one; delete a refused update's residual."""
        staged = self.staged_residual(client, round_id)
        if not (accepted and staged.exists()):
            staged.unlink(missing_ok=True)
            return
        path = self._path(client, "residual", round_id)
        staged.replace(path)
        self._written.add(path.name)
        rounds = {*self._rounds.get((self._numbers[client], "residual"), ()), round_id}
        self._keep_only(client, "residual", rounds, {max(rounds)})

    def _keep_only(self, client: ClientId, kind: str, rounds: set[RoundId], keep: set[RoundId]) -> None:
        for path in (self._path(client, kind, number) for number in rounds - keep):
            if path.name not in self._named[0] and path.name not in self._named[1]:
                path.unlink(missing_ok=True)
        self._rounds[self._numbers[client], kind] = sorted(rounds & keep)

    def _path(self, client: ClientId, kind: str, round_id: RoundId) -> Path:
        return self._folder / _name(self._numbers[client], kind, round_id)


def _name(number: int, kind: str, round_id: RoundId) -> str:
    return f"{number}.{kind}.{round_id}.safetensors"

"""What a simulated client keeps for itself between rounds: control variates, layers of its own, what a codec left out.

    <client>.own.<round>         as the training for that round has left it; current when its update is in a model
    <client>.residual.<round>    what the codec left out of that round's update; current when the update is accepted

On disk, because many clients times a model is more than memory holds. A run that is interrupted goes on from a saved
state, and trains what came after it again: of that, nothing may be left, and what the state names must be there.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from atoll.aggregation.tensors import safetensors_file
from atoll.client.disk.client_state import KEEP
from atoll.parallel.task.arrays import Arrays
from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.errors import StoreCorrupted

_NAME = re.compile(r"(\d+)\.(own|residual)\.(\d+)\.safetensors")


class OwnStates:
    """The files of one folder. In their names clients are numbers: a client's name may hold what no file's can.

    Args:
        folder: of the files.
        clients: the number of each.
        named: the files that belong to the state with which the run goes on; all others go.

    Raises:
        StoreCorrupted: one of these is not there.
    """

    def __init__(self, folder: Path, clients: Mapping[ClientId, int], named: Collection[str] = ()) -> None:
        self._folder, self._numbers = folder, clients
        self._rounds: dict[tuple[int, str], list[RoundId]] = {}
        self._named = frozenset[str](), frozenset(named)
        """The files of the last saved state but one, and of the last."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.name not in self._named[1]:
                path.unlink()
        for name in named:
            self._take_up(name)

    def _take_up(self, name: str) -> None:
        found = _NAME.fullmatch(name)
        if found is None or not (self._folder / name).exists():
            raise StoreCorrupted(f"{self._folder / name}: a client keeps it for the rounds to come, and it is gone")
        rounds = self._rounds.setdefault((int(found[1]), found[2]), [])
        rounds.append(RoundId(int(found[3])))
        rounds.sort()

    def named(self) -> list[str]:
        """The files of the state that is saved now; they stay until this was called twice again."""
        names = frozenset(
            _name(number, what, round_id) for (number, what), rounds in self._rounds.items() for round_id in rounds
        )
        for name in self._named[0] - self._named[1] - names:
            (self._folder / name).unlink(missing_ok=True)
        self._named = self._named[1], names
        return sorted(names)

    @property
    def is_used(self) -> bool:
        """Whether any client keeps anything."""
        return bool(self._rounds)

    def find(self, client: ClientId, counted_round: RoundId) -> Arrays | None:
        """What the training has left that counted last; None: none has."""
        is_here = counted_round in self._rounds.get((self._numbers[client], "own"), ())
        return safetensors_file.read(self._path(client, "own", counted_round)) if is_here else None

    def keep(self, client: ClientId, round_id: RoundId, counted_round: RoundId, own: Arrays) -> None:
        """What a training has left; what came before the round that counted can count no more."""
        safetensors_file.write(self._path(client, "own", round_id), own, durable=False)
        rounds = {*self._rounds.get((self._numbers[client], "own"), ()), round_id}
        waiting = sorted(number for number in rounds if number > counted_round)[-KEEP:]
        self._keep_only(client, "own", rounds, {counted_round, *waiting})

    def residual(self, client: ClientId) -> Path | None:
        """What the last accepted update has left out; None: nothing."""
        rounds = self._rounds.get((self._numbers[client], "residual"))
        return self._path(client, "residual", max(rounds)) if rounds else None

    def staged_residual(self, client: ClientId, round_id: RoundId) -> Path:
        """Where what an update leaves out waits for its answer."""
        return self._path(client, "residual", round_id).with_suffix(".staged")

    def settle_residual(self, client: ClientId, round_id: RoundId, *, accepted: bool) -> None:
        """The update of a round is answered: if it counts, so does what it has left out, and nothing before."""
        staged = self.staged_residual(client, round_id)
        if not (accepted and staged.exists()):
            staged.unlink(missing_ok=True)
            return
        staged.replace(self._path(client, "residual", round_id))
        rounds = {*self._rounds.get((self._numbers[client], "residual"), ()), round_id}
        self._keep_only(client, "residual", rounds, {max(rounds)})

    def _keep_only(self, client: ClientId, what: str, rounds: set[RoundId], keep: set[RoundId]) -> None:
        for path in (self._path(client, what, number) for number in rounds - keep):
            if path.name not in self._named[0] and path.name not in self._named[1]:
                path.unlink(missing_ok=True)
        self._rounds[self._numbers[client], what] = sorted(rounds & keep)

    def _path(self, client: ClientId, what: str, round_id: RoundId) -> Path:
        return self._folder / _name(self._numbers[client], what, round_id)


def _name(number: int, what: str, round_id: RoundId) -> str:
    return f"{number}.{what}.{round_id}.safetensors"

"""What a simulated client keeps for itself between rounds: control variates, layers of its own, what a codec left out.

    <client>.own.<round>         as the training for that round has left it; current when its update is in a model
    <client>.residual.<round>    what the codec left out of that round's update; current when the update is accepted

On disk, because many clients times a model is more than memory holds. A run that is interrupted goes on from the end of
a round, and trains what came after it again: of that, nothing may be left.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from atoll.aggregation import tensorfile
from atoll.client.personal import KEEP
from atoll.parallel.arrays import Arrays
from atoll.protocol.vocabulary import ClientId, RoundId

_NAME = re.compile(r"(\d+)\.(own|residual)\.(\d+)\.safetensors")


class OwnStates:
    """The files of one folder. In their names clients are numbers: a client's name may hold what no file's can.

    Args:
        folder: of the files.
        clients: the number of each.
        next_round: that the run goes on with; what a later one has left goes.
    """

    def __init__(self, folder: Path, clients: Mapping[ClientId, int], next_round: RoundId) -> None:
        self._folder, self._numbers = folder, clients
        self._rounds: dict[tuple[int, str], list[RoundId]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name is None or int(name[3]) >= next_round:
                path.unlink()
            else:
                self._rounds.setdefault((int(name[1]), name[2]), []).append(RoundId(int(name[3])))

    @property
    def is_used(self) -> bool:
        """Whether any client keeps anything."""
        return bool(self._rounds)

    def find(self, client: ClientId, counted_round: RoundId) -> Arrays | None:
        """What the training has left that counted last; None: none has."""
        is_here = counted_round in self._rounds.get((self._numbers[client], "own"), ())
        return tensorfile.read(self._path(client, "own", counted_round)) if is_here else None

    def keep(self, client: ClientId, round_id: RoundId, counted_round: RoundId, own: Arrays) -> None:
        """What a training has left; what came before the round that counted can count no more."""
        tensorfile.write(self._path(client, "own", round_id), own, durable=False)
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
        """The update of a round is answered. The residual before stays: the round may be begun again."""
        staged = self.staged_residual(client, round_id)
        if not (accepted and staged.exists()):
            staged.unlink(missing_ok=True)
            return
        staged.replace(self._path(client, "residual", round_id))
        rounds = {*self._rounds.get((self._numbers[client], "residual"), ()), round_id}
        self._keep_only(client, "residual", rounds, set(sorted(rounds)[-2:]))

    def _keep_only(self, client: ClientId, what: str, rounds: set[RoundId], keep: set[RoundId]) -> None:
        for number in rounds - keep:
            self._path(client, what, number).unlink(missing_ok=True)
        self._rounds[self._numbers[client], what] = sorted(rounds & keep)

    def _path(self, client: ClientId, what: str, round_id: RoundId) -> Path:
        return self._folder / f"{self._numbers[client]}.{what}.{round_id}.safetensors"

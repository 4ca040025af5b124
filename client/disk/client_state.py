"""The client state that stays at a site between rounds and is never sent: a control variate, the site's local layers.

    <run>.<round>.safetensors    state after the training for that round

The state after a training becomes current neither when the training ends nor when its update is accepted, but when the
update is in a committed model: only then do client state and model come from the same rounds. So the store stages each
state under its round, durable before its update is, and the next invitation names the round that counted. A crash at
any point, a refused update or an abandoned round needs no undo.
"""

import os
import re
from pathlib import Path

from atoll.aggregation.folders import sync_folder
from atoll.client.disk.spool import plain_name
from atoll.protocol.durable import move_into
from atoll.protocol.vocabulary import RoundId, RunId

KEEP = 8
"""Most staged states of one run, beside the one that counted."""


class PersonalState:
    """The client states in one folder, of all runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, run_id: RunId, counted_round: RoundId) -> Path | None:
        """Return the state after the training that counted; None when none has counted, or its file is missing."""
        path = self._path(run_id, counted_round)
        return path if counted_round and path.is_file() else None

    def stage(self, run_id: RunId, round_id: RoundId, counted_round: RoundId, data: Path) -> None:
        """Stage the state after a training by moving its file; durable on return.

        Deletes states that can no longer count: of rounds before the one that counted, the oldest of more than `KEEP`
        staged ones, and those of an earlier run of the same name, which have rounds after this one.
        """
        with data.open("rb") as file:
            os.fsync(file.fileno())
        move_into(data, self._path(run_id, round_id))
        sync_folder(self._folder)
        rounds = self._rounds(run_id)
        staged = [number for number in rounds if counted_round < number <= round_id]
        for number in {*rounds} - {counted_round, *staged[-KEEP:]}:
            self._path(run_id, number).unlink(missing_ok=True)

    def _rounds(self, run_id: RunId) -> list[RoundId]:
        name = re.compile(re.escape(plain_name(run_id)) + r"\.([0-9]+)\.safetensors")
        found = map(name.fullmatch, os.listdir(self._folder))
        return sorted(RoundId(int(match[1])) for match in found if match)

    def _path(self, run_id: RunId, round_id: RoundId) -> Path:
        return self._folder / f"{plain_name(run_id)}.{round_id}.safetensors"

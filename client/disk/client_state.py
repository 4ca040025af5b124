"""What an agent keeps for itself between rounds, and never sends: its control variate, layers of its own.

    <run>.<round>.safetensors    as the training for that round has left it

A training's outcome does not become current when it is done, nor when its update is accepted, but when the update is in
a committed model: only then do the client's state and the model tell of the same rounds. So each outcome waits under
its round, durable before its update is, and the next invitation says which one counted. A crash at any point, a refused
update and an abandoned round leave nothing to be undone.
"""

import os
import re
from pathlib import Path

from atoll.aggregation.folders import sync_folder
from atoll.client.disk.spool import plain_name
from atoll.protocol.vocabulary import RoundId, RunId

KEEP = 8
"""Outcomes of one run that may wait, beside the one that counted."""


class PersonalState:
    """The files of one folder; each run has its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, run_id: RunId, counted_round: RoundId) -> Path | None:
        """The outcome of the training that counted; None when none has counted, or the file is gone."""
        path = self._path(run_id, counted_round)
        return path if counted_round and path.is_file() else None

    def stage(self, run_id: RunId, round_id: RoundId, counted_round: RoundId, data: Path) -> None:
        """Take over what a training has left; on return it is durable, and `data` is gone.

        What came before the round that counted can count no more, and goes; so do the oldest of too many that wait, and
        what an earlier run of the same name has left: its rounds are yet to come.
        """
        with data.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(data, self._path(run_id, round_id))
        sync_folder(self._folder)
        rounds = self._rounds(run_id)
        waiting = [number for number in rounds if counted_round < number <= round_id]
        for number in {*rounds} - {counted_round, *waiting[-KEEP:]}:
            self._path(run_id, number).unlink(missing_ok=True)

    def _rounds(self, run_id: RunId) -> list[RoundId]:
        name = re.compile(re.escape(plain_name(run_id)) + r"\.([0-9]+)\.safetensors")
        found = map(name.fullmatch, os.listdir(self._folder))
        return sorted(RoundId(int(match[1])) for match in found if match)

    def _path(self, run_id: RunId, round_id: RoundId) -> Path:
        return self._folder / f"{plain_name(run_id)}.{round_id}.safetensors"

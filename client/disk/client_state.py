"""The client state, which stays at a site between rounds and is never sent: a control variate, the site's local layers.

    <run>.<round>.<SHA-256>.safetensors    state after the training for that round, with the digest of the file

A state becomes current when its update is part of a committed model, not earlier: only then do client state and model
come from the same rounds. So the store stages each state under its round, durable before its update is, and the next
invitation names the round that counted. A crash at any point, a refused update or an abandoned round needs no undo. A
file's digest is checked before use.
"""

import os
import re
from pathlib import Path

from atoll.client.disk.named_digest import check_named
from atoll.client.disk.spool import plain_name
from atoll.ground.durable import move_into
from atoll.ground.file_digest import sha256_of_file
from atoll.ground.folders import sync_folder
from atoll.protocol.vocabulary import RoundId, RunId

KEEP = 8
"""Largest number of staged states of one run, beside the current one."""


class PersonalState:
    """Store of the client states of all runs, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, run_id: RunId, counted_round: RoundId) -> Path | None:
        """Return the current state of a run; None if no update has counted yet, or its file is missing.

        Raises:
            StateDamaged: the file does not match its digest.
        """
        found = self._files(run_id).get(counted_round, []) if counted_round else []
        if not found:
            return None
        return check_named(max(found, key=lambda each: each.stat().st_mtime_ns))  # an update was being replaced

    def stage(self, run_id: RunId, round_id: RoundId, counted_round: RoundId, data: Path) -> None:
        """Stage the state after a training by moving its file; durable on return.

        Deletes states that can no longer count: of rounds before the one that counted, the oldest of more than `KEEP`
        staged ones, and states of an earlier run of the same name, which have later rounds than this one.
        """
        with data.open("rb") as file:
            os.fsync(file.fileno())
        path = self._folder / f"{plain_name(run_id)}.{round_id}.{sha256_of_file(data)}.safetensors"
        move_into(data, path)
        sync_folder(self._folder)
        files = self._files(run_id)
        staged = [number for number in sorted(files) if counted_round < number <= round_id]
        kept = {counted_round, *staged[-KEEP:]}
        for number, of_round in files.items():
            for each in of_round:
                if number not in kept or (number == round_id and each != path):
                    each.unlink(missing_ok=True)

    def _files(self, run_id: RunId) -> dict[RoundId, list[Path]]:
        name = re.compile(re.escape(plain_name(run_id)) + r"\.([0-9]+)\.[0-9a-f]{64}\.safetensors")
        found: dict[RoundId, list[Path]] = {}
        for match in filter(None, map(name.fullmatch, os.listdir(self._folder))):
            found.setdefault(RoundId(int(match[1])), []).append(self._folder / match[0])
        return found

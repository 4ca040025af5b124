"""Folders of results: each has the files of one simulation or of one training, and nothing of another kind."""

from collections.abc import Iterable
from pathlib import Path

SIMULATION, TRAINING = "a simulated run", "a training of `atoll train`"

MARKS = {
    "rounds.jsonl": SIMULATION,
    "exchanges.jsonl": SIMULATION,
    "state.json": SIMULATION,
    "log.jsonl": TRAINING,
    "state.db": "the state of a coordinator",
    "policy.db": "the state of an agent",
}
"""Files that only one kind of folder has, which later commands read there."""


def faults_of_place(folder: Path, kind: str, overwritten: Iterable[str] = ()) -> list[str]:
    """Return why a run cannot have its files in a folder; empty: it can.

    Args:
        folder: the folder, which may be missing.
        kind: the run's, `SIMULATION` or `TRAINING`.
        overwritten: names of files there that the run would overwrite, and that are of no run; reported where the
            folder has no other kind of run.
    """
    found = {kind_there: mark for mark, kind_there in MARKS.items() if (folder / mark).exists()}
    found.pop(kind, None)
    others = [f"there is {other} ({mark})" for other, mark in found.items()]
    lost = [f"{name} there is not from an earlier run, and would be overwritten" for name in overwritten]
    return [f"{folder}: {fault}; choose another folder with --out" for fault in others or lost]

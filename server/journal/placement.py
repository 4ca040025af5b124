"""Where the bytes of a run lie: with the coordinator, or at so many aggregation ranks. It is fixed when a run begins.

Every rank keeps its part of each version: with another number of ranks the parts would be others.

    runs/<run_id>/ranks      in the coordinator's directory: how many there are; no such file: none
    rank.json                in a rank's own directory: which one it is
"""

import json
from pathlib import Path

from atoll.protocol.durable import write_atomically


class WrongPlace(OSError):
    """A directory is that of another rank, or of another number of ranks."""


def write_num_ranks(run_folder: Path, num_ranks: int) -> None:
    """Note at how many ranks a run is kept, before anything of it is."""
    run_folder.mkdir(parents=True, exist_ok=True)
    if num_ranks:
        write_atomically(run_folder / "ranks", str(num_ranks).encode())
    else:
        (run_folder / "ranks").unlink(missing_ok=True)


def num_ranks_of(run_folder: Path) -> int:
    """At how many ranks a run is kept; 0: the coordinator has it all.

    Raises:
        WrongPlace: the note is not legible.
    """
    path = run_folder / "ranks"
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise WrongPlace(f"{path} is damaged: it must hold the number of aggregation ranks of the run") from error


def take_place(state: Path, rank: int, num_ranks: int) -> None:
    """Let a directory be that of one rank, now and for ever.

    Raises:
        WrongPlace: it is another's; the message names both.
        OSError: it cannot be written.
    """
    path, place = state / "rank.json", {"rank": rank, "ranks": num_ranks}
    if not path.exists():
        write_atomically(path, json.dumps(place).encode())
        return
    try:
        found = json.loads(path.read_text())
        is_ours, whose = found == place, f"rank {found['rank']} of {found['ranks']}"
    except (ValueError, KeyError, TypeError) as error:
        raise WrongPlace(f"{path} is damaged: it must say {json.dumps(place)}, if this is rank {rank}'s") from error
    if not is_ours:
        raise WrongPlace(f"{state} belongs to {whose}, and cannot be that of rank {rank} of {num_ranks}: name another")


def state_of_rank(state: Path, rank: int, num_ranks: int) -> Path:
    """Where a rank keeps everything when the coordinator with this state directory starts it."""
    return state / "aggregators" / f"{rank}of{num_ranks}"

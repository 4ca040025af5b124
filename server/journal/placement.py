"""The placement of a run's bytes, at the coordinator or at a number of aggregation ranks, fixed when the run begins.

Every rank stores a part of each version, so the number of ranks determines the parts.

    runs/<run_id>/ranks      in the coordinator's directory: the number of ranks; no such file: none
    rank.json                in a rank's directory: the rank, and the number of ranks
"""

import json
from pathlib import Path

from atoll.ground.durable import write_atomically


class WrongPlace(OSError):
    """Error: a directory belongs to another rank, or to another number of ranks."""


def write_num_ranks(run_folder: Path, num_ranks: int) -> None:
    """Record the number of ranks of a run, before any of its other files."""
    run_folder.mkdir(parents=True, exist_ok=True)
    if num_ranks:
        write_atomically(run_folder / "ranks", str(num_ranks).encode())
    else:
        (run_folder / "ranks").unlink(missing_ok=True)


def num_ranks_of(run_folder: Path) -> int:
    """Return the number of ranks of a run; 0: the coordinator has all of its bytes.

    Raises:
        WrongPlace: the file is damaged.
    """
    path = run_folder / "ranks"
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise WrongPlace(f"{path} is damaged: it must hold the number of aggregation ranks of the run") from error


def take_place(state: Path, rank: int, num_ranks: int) -> None:
    """Assign a directory to one rank permanently.

    Raises:
        WrongPlace: it belongs to another rank; the message names both.
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
        raise WrongPlace(f"{path} is damaged: for rank {rank} its content must be {json.dumps(place)}") from error
    if not is_ours:
        raise WrongPlace(
            f"{state} belongs to {whose}, and cannot belong to rank {rank} of {num_ranks}: name another directory"
        )


def state_of_rank(state: Path, rank: int, num_ranks: int) -> Path:
    """Return the directory of a rank that the coordinator with this state directory starts."""
    return state / "aggregators" / f"{rank}of{num_ranks}"

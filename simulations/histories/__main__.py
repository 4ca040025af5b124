"""The same as `atoll simulate --faults`, for `make soak`: python -m atoll.simulations.histories --seeds 20000."""

import argparse
import sys

from atoll.simulations.histories.command import judge_histories
from atoll.simulations.histories.faults import PRESETS


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m atoll.simulations.histories", description=__doc__)
    parser.add_argument("--faults", default="standard", choices=sorted(PRESETS), help="what goes wrong")
    parser.add_argument("--seeds", type=int, default=1000, help="how many histories to judge")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay one seed and show its whole history")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one for each processor")
    given = parser.parse_args()
    return judge_histories(given.faults, seeds=given.seeds, first=given.first, seed=given.seed, jobs=given.jobs)


if __name__ == "__main__":
    sys.exit(main())

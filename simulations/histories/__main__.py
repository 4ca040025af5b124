"""The command of `make soak`, like `atoll simulate --faults`: python -m atoll.simulations.histories --seeds 20000."""

import argparse
import sys

from atoll.simulations.histories.command import judge_histories
from atoll.simulations.histories.faults import PRESETS


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m atoll.simulations.histories", description=__doc__)
    parser.add_argument("--faults", default="standard", choices=sorted(PRESETS), help="preset of the faults")
    parser.add_argument("--seeds", type=int, default=1000, help="number of histories to judge")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="seed to replay, with its whole history")
    parser.add_argument("--jobs", type=int, default=0, help="number of processes; 0: one for each processor")
    options = parser.parse_args()
    return judge_histories(
        options.faults, seeds=options.seeds, first=options.first, seed=options.seed, jobs=options.jobs
    )


if __name__ == "__main__":
    sys.exit(main())

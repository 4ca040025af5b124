"""Many worlds, each judged; and one world, shown to a person.

python -m atoll.simulations.histories --seeds 20000     # make soak
python -m atoll.simulations.histories --seed 17         # replays one seed and prints its whole history
"""

import argparse
import sys
import time
from collections import Counter

from atoll.simulations.checks import check
from atoll.simulations.history import History
from atoll.simulations.scenario import Scenario, random_scenario
from atoll.simulations.world import World

LINES_SHOWN = 60


class BadHistory(AssertionError):
    """A history in which something happened that must never happen; the text replays it."""


def judged(seed: int, scenario: Scenario | None = None) -> History:
    """Let one world happen and judge it.

    Raises:
        BadHistory: with the fault, the end of the history and the command that replays it.
    """
    world = World(seed, scenario or random_scenario(seed))
    try:
        history = world.run()
        check(history)
    except Exception as error:  # whatever a machine raises, the history says how it came to that
        how = f"python -m atoll.simulations.histories --seed {seed}"
        shown = world.history.transcript(last=LINES_SHOWN)
        raise BadHistory(f"seed={seed}: {type(error).__name__}: {error}\n\n{shown}\n\nreplay: {how}") from error
    return history


def soak(first: int, count: int) -> int:
    """Judge many seeds; how many are bad."""
    begun, ends, num_steps, bad = time.perf_counter(), Counter[str](), 0, 0
    for seed in range(first, first + count):
        try:
            history = judged(seed)
        except BadHistory as error:
            bad += 1
            print(str(error).partition("\n")[0], file=sys.stderr, flush=True)
            continue
        assert history.machine is not None
        ends[history.machine.ledger.state] += 1
        num_steps += len(history.steps)
    seconds = time.perf_counter() - begun
    print(f"{count} seeds from {first}, {bad} bad; {num_steps} events, {seconds:.1f} s, {count / seconds:.0f} seeds/s")
    print(", ".join(f"{state}: {number}" for state, number in sorted(ends.items())))
    return bad


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m atoll.simulations.histories", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many histories to judge")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay one seed and show its whole history")
    arguments = parser.parse_args()
    if arguments.seed is None:
        return 1 if soak(arguments.first, arguments.seeds) else 0
    world = World(arguments.seed, random_scenario(arguments.seed))
    try:
        check(world.run())
    finally:
        print(world.history.transcript())
    return 0


if __name__ == "__main__":
    sys.exit(main())

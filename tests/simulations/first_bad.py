"""Judge histories until the first bad one: `python -m tests.simulations.first_bad 400`; exit code 1 and why."""

import sys

import atoll.simulations.histories as histories


def main(seeds: int) -> int:
    for seed in range(seeds):
        try:
            histories.judged(seed)
        except histories.BadHistory as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

"""The search for the first bad history: python -m tests.histories.first_bad 400; exit code 1 if found."""

import sys

from tests.histories import judge


def main(seeds: int) -> int:
    for seed in range(seeds):
        try:
            judge.judged(seed)
        except judge.BadHistory as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

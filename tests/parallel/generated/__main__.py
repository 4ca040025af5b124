"""Many generated models: `python -m tests.parallel.generated [--models 5000] [--seed 0]`; each wrong one is shown."""

import argparse
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.parallel.generated.judge import Tally
from tests.parallel.generated.strategies import Case, cases


def main() -> None:
    """Judge the models; exit code 1 if one is wrong, or a third is refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    tally, began, wrong = Tally(), time.monotonic(), Counter[str]()

    @seed(asked.seed)
    @settings(
        max_examples=asked.models,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def each(case: Case) -> None:
        found = tally.judge(case)
        if not found.startswith(("equal", "refused")):
            wrong[found[-200:]] += 1
            print(f"WRONG {case}\n      {found[-1500:]}", flush=True)

    each()
    for sentence, number in tally.refusals.most_common():
        print(f"{number:5} {sentence}")
    print(f"{tally}, {sum(wrong.values())} wrong, {time.monotonic() - began:.0f} s")
    sys.exit(bool(wrong) or 3 * tally.words["refused"] >= sum(tally.words.values()))


if __name__ == "__main__":
    main()

"""The table of Flower's strategies over our grid, with a coordinator and seven agents: `make flower-table`.

python -m tests.messages.strategies [CASE...]

Each case is three rounds, and is compared with the same case in Flower's own loop in this process. It ends with 1 if a
case is wrong.
"""

import sys
import tempfile
import time
from pathlib import Path

from tests.messages.strategies.processes import by_processes
from tests.messages.strategies.table import by_flower, opened, row


def main(names):
    """Print the table; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="atoll-flower-table-") as place, opened() as (app, cases):
        folder = Path(place)
        if unknown := [name for name in names if name not in cases]:
            print(f"no such case: {', '.join(unknown)}; there are: {', '.join(cases)}")
            return 2
        options = {"cases": ",".join(names or cases)}
        begun = time.monotonic()
        hosted = by_processes(folder, options)
        taken = time.monotonic() - begun
        by_flower(app, folder / "flower", options)
        rows = [row(name, hosted, folder / "flower", has_secret=True) for name in names or cases]
    for one in rows:
        print(one)
    wrong = [one.name for one in rows if not one.is_right]
    print(f"\n{len(rows)} cases by a coordinator and seven agents in {taken:.0f} s: {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

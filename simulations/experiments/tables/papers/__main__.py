"""Write the papers' tables, with our numbers, into `docs/papers.md`.

    ATOLL_DATA=... python -m atoll.simulations.experiments.tables.papers [mcmahan | fedprox | fedopt ...]

A run that was cut off is gone on with, and one that is over is not run again. MNIST is looked for in ATOLL_DATA.
"""

import argparse
import sys
from pathlib import Path

from atoll.simulations.experiments.here import tell
from atoll.simulations.experiments.tables.pages import write_parts
from atoll.simulations.experiments.tables.papers import fedopt, fedprox, mcmahan

PAGE = Path(__file__).resolve().parents[4] / "docs" / "papers.md"
PAPERS = {paper.name: paper for paper in (mcmahan.PAPER, fedprox.PAPER, fedopt.PAPER)}


def main(arguments: list[str]) -> None:
    """Run what is not there yet, and write the tables that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m atoll.simulations.experiments.tables.papers")
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"of {', '.join(PAPERS)}; absent: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=Path("atoll-papers"), help="where the runs are")
    parser.add_argument("--page", type=Path, default=PAGE, help="whose measured parts are written")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.papers if name not in PAPERS]:
        parser.error(f"{', '.join(unknown)}: unknown (known: {', '.join(PAPERS)})")
    for name in asked.papers or PAPERS:
        paper = PAPERS[name]
        tell(list(paper.cells), asked.out / name, jobs=asked.jobs, goal=paper.goal)
        write_parts(asked.page, {name: paper.table(asked.out / name)})
        sys.stdout.write(f"{asked.page}: {name} is written\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The command that writes the papers' tables, with our numbers, into `docs/papers.md`.

    ATOLL_DATA=... python -m benchmarks.papers [mcmahan | fedprox | fedopt ...]

An interrupted run is resumed, and one that is over is not run again. MNIST is read from ATOLL_DATA.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.papers import fedopt, fedprox, mcmahan
from benchmarks.papers.pages import write_parts
from benchmarks.papers.process_pool import run_with_progress

PAGE = Path(__file__).resolve().parents[2] / "docs" / "papers.md"
PAPERS = {paper.name: paper for paper in (mcmahan.PAPER, fedprox.PAPER, fedopt.PAPER)}


def main(arguments: list[str]) -> None:
    """Run the cells that are not over, and write the tables of the named papers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers")
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"names of {', '.join(PAPERS)}; absent: all")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--out", type=Path, default=Path("atoll-papers"), help="folder of the runs")
    parser.add_argument("--page", type=Path, default=PAGE, help="page in which the measured parts are replaced")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.papers if name not in PAPERS]:
        parser.error(f"{', '.join(unknown)}: unknown (known: {', '.join(PAPERS)})")
    for name in options.papers or PAPERS:
        paper = PAPERS[name]
        run_with_progress(list(paper.cells), options.out / name, jobs=options.jobs, goal=paper.goal)
        write_parts(options.page, {name: paper.table(options.out / name)})
        sys.stdout.write(f"{options.page}: {name} is written\n")


if __name__ == "__main__":
    main(sys.argv[1:])

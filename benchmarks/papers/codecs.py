"""The table of codecs in `docs/experiments.md`: rounds and bytes to the same accuracy on digits that are not IID.

    python -m benchmarks.papers.codecs [--jobs N] [--out DIR] [--page FILE]

20 clients with Dirichlet(0.3), ten of them in a round, five local steps; the target is an accuracy on the server's test
data. Each entry is the mean ± standard deviation over three seeds.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.simulations.experiments.bands import mean_of, number
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import read_run
from atoll.simulations.experiments.table import COLUMNS, Objective, markdown
from benchmarks.papers.pages import write_parts
from benchmarks.papers.process_pool import run_with_progress

PAGE = Path(__file__).resolve().parents[2] / "docs" / "experiments.md"
OBJECTIVE = Objective("server/accuracy", target=0.94)
SEEDS = (1, 2, 3)

BASE: Mapping[str, Any] = {
    "rounds": 150,
    "local.lr": 0.3,
    "population.kind": "dirichlet",
    "population.alpha": 0.3,
    "population.clients": 20,
    "round.cohort_size": 10,
    "round.over_selection": 1.0,
    "simulation.engine": "batched",
}

CODECS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    **{name: {"aggregation.codec": name} for name in ("bf16", "fp16", "qsgd8")},
    **{f"topk {share:.0%}": {"aggregation.codec": "topk", "aggregation.topk_fraction": share} for share in (0.1, 0.01)},
    "sign": {"aggregation.codec": "sign"},
}


def cell(codec: str, seed: int, **changes: Any) -> Cell:
    """Return one run of the table."""
    settings = {**BASE, **CODECS[codec], "seed": seed, **changes}
    return Cell({"codec": codec, "seed": str(seed)}, settings, "benchmarks.papers.digits:task")


def cells() -> list[Cell]:
    """Return all runs of the table."""
    return [cell(codec, seed) for codec in CODECS for seed in SEEDS]


def table(out: Path) -> str:
    """Return the table in Markdown, with the bytes of the updates in kB and relative to those without a codec."""
    plain = _mean(out, "none", "bytes_up_to_target").mean
    lines = []
    for codec in CODECS:
        rounds, moved, best = (_mean(out, codec, name) for name in ("rounds_to_target", "bytes_up_to_target", "best"))
        share = "-" if moved.mean is None or not plain else f"{moved.mean / plain:.1%}"
        thousands = "-" if moved.mean is None else number(round(moved.mean / 1000))
        lines.append([codec, rounds, thousands, share, best])
    target = f"{OBJECTIVE.target:g}"
    return markdown(["codec", f"rounds to {target}", f"kB up to {target}", "of none", "best accuracy"], lines)


def _mean(out: Path, codec: str, column: str) -> Any:
    return mean_of([COLUMNS[column](read_run(out / cell(codec, seed).folder), OBJECTIVE) for seed in SEEDS])


def main(arguments: list[str]) -> None:
    """Run the cells that are not over, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers.codecs")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--out", type=Path, default=Path("atoll-codecs"), help="folder of the runs")
    parser.add_argument("--page", type=Path, default=PAGE, help="page in which the measured part is replaced")
    options = parser.parse_args(arguments)
    run_with_progress(cells(), options.out, jobs=options.jobs)
    write_parts(options.page, {"codecs": table(options.out)})
    sys.stdout.write(f"{options.page}: written\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""A simulation of many sites: what evaluation by all of them adds to a round, and what its start takes.

    python -m benchmarks.many_sites [--sites N] [--passes N] [--quick]

Part 1: rounds of a cohort of 100 among 2,000 sites of 8 examples, with and without the evaluation of each version by
all sites, in turns and by each engine of one process. A round is the median of a run's, without the first, which reads
data.

Part 2: `atoll simulate` with one round of 100 among 100,000 sites, from its first line to its end, less the same with
100 sites, which has the imports and the round: as the first cell of a sweep, which reads the data of all sites, and as
the second. Of the second one, the facts of the sites, which it takes from the first, are also measured alone. Beside
the seconds are those of the processors, which other work on the machine stretches less.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import atoll
from atoll import Local, Task
from atoll.simulations.federation.kept_facts import KeptFacts
from atoll.simulations.populations.opened_files import OPENED
from benchmarks.processes import ROOT
from benchmarks.report import Bar, conclude, say

SITES, EVALUATED, COHORT, ROUNDS, PASSES = 100_000, 2_000, 100, 10, 3
TIMES_EVALUATION, START_S, SECOND_S = 3.0, 15.0, 1.0
ENGINES = ("sequential", "batched")


def data(site: str, split: str) -> TensorDataset | None:
    """Return a site's 8 examples, which follow from its number; test data only where a variable says so."""
    if split == "test" and not os.environ.get("ATOLL_BENCH_TESTED"):
        return None
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(int(site[1:])))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def task_of(sites: int) -> Task:
    """Return softmax regression on that many sites."""
    return Task(
        model=lambda: nn.Linear(16, 2),
        data=data,
        loss=nn.functional.cross_entropy,
        sites=[f"s{number:06}" for number in range(sites)],
        local=Local(batch_size=4),
    )


task = task_of(int(os.environ.get("ATOLL_BENCH_SITES", "100")))


def seconds_of_a_round(engine: str, every: int) -> float:
    """Return the median duration of a round, with evaluations at an interval; 0: none [s]."""
    settings = {
        "round.cohort_size": COHORT,
        "simulation.engine": engine,
        "simulation.workers": 1,
        "evaluation.clients_every": every,
    }
    run = atoll.simulate(task_of(EVALUATED), rounds=ROUNDS, set=settings, progress=False)
    ends: list[float] = run.rounds.column("real_s")
    return float(median(end - begin for begin, end in pairwise(ends)))


def evaluations(passes: int) -> dict[str, Any]:
    """Measure part 1: for each engine the seconds of a round without and with evaluations, and the ratio."""
    os.environ["ATOLL_BENCH_TESTED"] = "1"
    found: dict[str, Any] = {}
    for engine in ENGINES:
        pairs = [(seconds_of_a_round(engine, 0), seconds_of_a_round(engine, 1)) for _ in range(passes)]
        without, evaluating = (median(side) for side in zip(*pairs, strict=True))
        ratio = median(b / a for a, b in pairs)
        found[engine] = {"without_s": without, "with_s": evaluating, "times": ratio}
        say(
            f"  {engine}: a round {without * 1e3:.1f} ms, with evaluations {evaluating * 1e3:.1f} ms: {ratio:.2f} times"
        )
    del os.environ["ATOLL_BENCH_TESTED"]
    return found


def simulated(sites: int, out: Path) -> dict[str, float]:
    """Run one cell of a sweep in the folder `out`, in a process; return its seconds, and those of the processors."""
    environment = {**os.environ, "ATOLL_BENCH_SITES": str(sites), "ATOLL_SITES": str(out.parent)}
    settings = [f"round.cohort_size={COHORT}", "simulation.engine=sequential"]
    command = [sys.executable, "-m", "atoll", "simulate", "benchmarks.many_sites:task", "--rounds", "1"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [*command, "--out", str(out), *(f"--set={setting}" for setting in settings)],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
    )
    real, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"s": real, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def starts(sites: int) -> dict[str, Any]:
    """Measure part 2."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as directory:
        sweep = Path(directory)
        few = simulated(COHORT, sweep / "few")
        first, second = (simulated(sites, sweep / name) for name in ("first", "second"))
        found = {name: {k: cell[k] - few[k] for k in cell} for name, cell in (("first", first), ("second", second))}
        OPENED.watch()
        many, kept = task_of(sites), KeptFacts(sweep)
        kept.read(many)
        kept.save()
        began, used = time.perf_counter(), time.process_time()
        assert KeptFacts(sweep).read(many).are_kept
        found["kept"] = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - used}
    for name, cell in found.items():
        say(f"  {sites} sites, {name}: {cell['s']:.1f} s ({cell['cpu_s']:.1f} s of the processors)")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure both parts, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=SITES)
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--quick", action="store_true", help="2,000 sites and one pass: a check, no measurement")
    given = parser.parse_args(arguments)
    sites, passes = (2_000, 1) if given.quick else (given.sites, given.passes)
    measured, started = evaluations(passes), starts(sites)
    bars = [
        *(
            Bar.at_most(
                f"a round with evaluations, {engine}: times one without", measured[engine]["times"], TIMES_EVALUATION
            )
            for engine in ENGINES
        ),
        Bar.at_most(f"start with {sites} sites [s]", started["first"]["s"], START_S),
        Bar.below(f"facts of {sites} sites in the second cell of a sweep [s]", started["kept"]["s"], SECOND_S),
    ]
    return conclude("many_sites", bars, ours=measured | started, theirs=None, why_not="no other side has both")


if __name__ == "__main__":
    sys.exit(main())

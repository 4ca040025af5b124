"""SIGKILL for the coordinator and the agents, at every crash point of a round and at random times.

    python -m benchmarks.crash_matrix [--quick] [--secure] [--part K/N] [--kills N] [--seed N] [--only STEP ...]

A coordinator and three agents are real processes; the updates are known to the bit. First comes an undisturbed run,
then one run for each step of `ground/process/crash_points.py`, in which a process kills itself and is restarted, then
runs in which processes are killed from outside. In some of the runs every agent sends its update in parts (`+ parts`),
which must give the bits of the whole updates. In others the first client is a mesh of two ranks (`+ mesh`), of which a
rank dies, or hangs, at each step of `parallel/mesh_client/crash_points.py`. Every run must finish. The figures:

    lost        updates that were accepted, by the records at any time or by an agent's log, and are in no committed
                model, without a record of the reason
    twice       updates that are in two committed models
    same_bits   runs whose every version has the digest that it has in the undisturbed run of the same clients

With `--secure` the updates come in secure sums, over four or five sites, and a run may have deaths of several
processes, ranks, lying sites and full disks: `benchmarks/secure_deaths.py` has the rows. There a round may
be abandoned and repeated, and the versions have no digests that are known, as each update is rounded at random; instead

    lost        as above
    twice       promises of a site with which two sums could open one of its updates
    same_bits   runs whose every version is its base and the mean of the updates that the record counts, to 2e-6

and a run in which an agent keeps an update after its end, or a process writes a traceback, has not finished.

A step at which no process died was not tested, which is a failure, too. The seconds of a recovery begin with the start
of the new process and end when it is back (the coordinator listens and has recovered its run, the agent is connected),
or with the next commit; those of a rank begin with its death and end with the next step of its training.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from atoll.ground.process.crash_points import STEPS
from atoll.parallel.mesh_client import crash_points as rank_crash_points
from benchmarks import secure_deaths
from benchmarks.evidence import Verdict
from benchmarks.federation import AGGREGATOR, COORDINATOR, RANK, SITES, Federation, Killer, Recovery, Shape
from benchmarks.processes import NotMeasured, keep_bytecode
from benchmarks.report import Bar, conclude, say, spread
from benchmarks.small_disk import enter_namespace

COUNTS = {
    "journal.before_write": (1, 2, 3, 8, 13),
    "journal.after_write": (1, 2, 3, 8, 13),
    "upload.mid_chunk": (1, 2, 5, 11),
    "upload.before_accept": (1, 2, 3),
    "aggregate.mid_fold": (1, 2, 3, 5),
    "publish.before": (1, 3, 4),
    "publish.after": (1, 3, 4),
    "download.mid": (1, 2, 7),
    "snapshot.before": (1, 3, 4),
    "snapshot.after": (1, 3, 4),
    "agent.downloading": (1, 2, 5),
    "agent.uploading": (1, 2, 5),
    "agent.answered": (1, 3),
}
"""The visits that are tested, for some steps; every other step is tested at its first and second visit."""

PARTED = {
    "upload.mid_chunk": (2, 7),
    "upload.before_check": (1, 5),
    "upload.part_kept": (1, 2, 4, 9, 12),
    "upload.before_accept": (1, 3),
    "journal.before_write": (8,),
    "journal.after_write": (8,),
    "agent.part_written": (1, 2, 4, 6),
    "agent.root_spooled": (1, 2),
    "agent.spooled": (1, 2),
    "agent.uploading": (2, 5),
    "agent.uploaded": (1, 3, 4),
    "agent.answered": (1, 2),
}
"""The visits that are tested with updates in parts: whatever happens between an update and its verdict."""

MESHED = {
    "agent.invited": (1, 2),
    "agent.downloading": (1,),
    "agent.downloaded": (1, 2),
    "agent.training": (1, 2),
    "agent.trained": (1, 2),
    "agent.part_written": (1, 2, 3),
    "agent.root_spooled": (1, 2),
    "agent.spooled": (1,),
    "agent.uploading": (1, 2),
    "agent.uploaded": (1, 2),
    "agent.answered": (1,),
    "agent.settled": (1,),
    "upload.part_kept": (1, 2),
    "upload.before_accept": (1, 3),
}
"""The visits that are tested with a client that is a mesh, beside the steps of its ranks."""

RANKS_MESHED = {"crew.mid_step": (1, 4, 20), "crew.stepped": (2, 16), "crew.saving": (1, 3), "crew.saved": (1, 4)}
"""The visits of some steps of a rank that are tested; every other step is tested at its first and second visit."""

HANGS = ("crew.mid_step:4 1 stop", "crew.saved:2 0 stop")

DIVIDED, IN_PARTS = "rows:4", " + parts"
MESH, IN_A_MESH = "dp_shard=2", " + mesh"
ONLY_IN_PARTS = ("upload.part_kept", "agent.part_written", "agent.root_spooled")

ELSEWHERE = (
    *("rank.", "exchange."),  # tests/federation/test_ranks.py, tests/messages/test_deaths.py
    *("agent.encoded", "agent.promised", "agent.masked", "agent.revealed"),  # --secure
    *("agent.noise_", "agent.charged"),  # tests/federation/private_deaths.py, and with sums test_private_sums.py
    "statistics.",  # tests/federation/statistics/test_secure_deaths.py
)
"""Beginnings of the steps that a plain run of rounds does not reach, with what kills a process at each."""

QUICK = (
    "journal.after_write:3",
    "upload.mid_chunk:2",
    "aggregate.mid_fold:2",
    "agent.uploading:2",
    "upload.part_kept:2" + IN_PARTS,
)
QUICK_SECURE = (
    "round.entry/UpdateReceived:3",
    "agent.masked:1",
    "round.entry/MaskedCame:3 + evaluations",
    "rank.folded:1 + ranks",
    "round.entry/OpeningFailed:1 + wrong shares",
    "round.entry/SharesCame:4 + full disk",
)
AGGREGATION_RANKS = 2
LIARS = {"wrong shares": ("shares", 2), "wrong words": ("words", 1)}
FREE_BYTES = {"full disk": 1_500_000, "no space": 0}
"""Bytes that a full disk has left: the journal or the promises fit, an update or a version does not; nothing."""
HEAL_MAX_S = 5.0
NUM_KILLS, NUM_KILLS_QUICK = 200, 6
KILLS_A_RUN = 6
PAUSE_S = (0.05, 2.0)


@dataclass
class Tally:
    """The figures of all disturbed runs together."""

    models: dict[str, dict[int, str]]
    """The digest of every version of an undisturbed run, by the mesh of its first client."""
    num_runs: int = 0
    num_same: int = 0
    num_kills: int = 0
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)

    def add(self, what: str, federation: Federation, verdict: Verdict) -> None:
        """Add a run that has ended."""
        if not federation.shape.in_sums:
            verdict.is_same = federation.end.models == self.models[federation.shape.mesh]
        self.num_runs += 1
        self.num_same += verdict.is_same
        self.num_kills += federation.num_kills
        self.lost += [f"{what}: {update}" for update in verdict.lost]
        self.twice += [f"{what}: {update}" for update in verdict.twice]
        self.unfinished += [f"{what}: {fault}" for fault in verdict.faults]
        self.recoveries += federation.recoveries
        seconds = ", ".join(f"{r.of} back in {r.back_s:.2f} s" for r in federation.recoveries if r.back_s is not None)
        say(f"  {what}: {verdict.text}; {seconds}")

    def failed(self, what: str, error: NotMeasured) -> None:
        """Add a run that has not ended."""
        self.num_runs += 1
        self.unfinished.append(f"{what}: {error}")
        say(f"  {what}: {error}")


def undisturbed(shape: Shape) -> dict[int, str]:
    """Return the digest of every version of a run without a kill."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        federation = Federation(Path(folder), shape)
        verdict = federation.run()
    if verdict.lost or verdict.twice or verdict.faults or len(federation.end.models) != 1 + shape.rounds:
        raise NotMeasured(f"the undisturbed run: {verdict.text}, {len(federation.end.models)} versions")
    say(f"undisturbed: {shape.rounds} rounds in {time.monotonic() - begun:.1f} s")
    return federation.end.models


def at_step(tally: Tally, planned: str, shape: Shape) -> None:
    """Run with one death at a crash point."""
    crash_at, who = planned.removesuffix(IN_PARTS).removesuffix(IN_A_MESH), COORDINATOR
    if crash_at.startswith("crew.") or planned.endswith(IN_A_MESH):
        shape, planned = replace(shape, mesh=MESH), crash_at + IN_A_MESH
    elif planned != crash_at or crash_at.partition(":")[0] in ONLY_IN_PARTS:
        shape, planned = replace(shape, divided=DIVIDED), crash_at + IN_PARTS
    if crash_at.startswith(("agent.", "crew.")):
        who = SITES[0] if crash_at.startswith("agent.") else RANK
    if shape.mesh not in tally.models:
        tally.models[shape.mesh] = undisturbed(shape)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        federation = Federation(Path(folder), shape, (who, crash_at))
        try:
            verdict = federation.run()
        except NotMeasured as error:
            tally.failed(planned, error)
            return
    if not federation.num_kills:
        tally.not_reached.append(planned)
    tally.add(planned, federation, verdict)


def in_a_sum(tally: Tally, planned: str, shape: Shape) -> None:
    """Run with secure sums, and with the death of one process or more."""
    (first, *others), kinds = secure_deaths.read(planned)
    who = {"agent": SITES[0], "crew": RANK, "rank": AGGREGATOR}.get(first.partition(".")[0], COORDINATOR)
    sites = iter(SITES[1:] if who == SITES[0] else SITES)
    deaths = {next(sites) if step.startswith("agent.") else COORDINATOR: step for step in others}
    in_sites = sum(step.startswith(("agent.", "crew.")) for step in (first, *others))
    shape = replace(
        shape,
        in_sums=5 if in_sites > 1 else 4,
        mesh=MESH if "mesh" in kinds else "",
        evaluates="evaluations" in kinds,
        ranks=AGGREGATION_RANKS if "ranks" in kinds else 0,
        liars=next((LIARS[kind] for kind in kinds if kind in LIARS), ("", 0)),
        free=next((FREE_BYTES[kind] for kind in kinds if kind in FREE_BYTES), -1),
    )
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        federation = Federation(Path(folder), shape, (who, first), deaths)
        try:
            verdict = federation.run()
        except NotMeasured as error:
            tally.failed(planned, error)
            return
    if federation.num_at_steps < 1 + len(others):
        tally.not_reached.append(planned)
    if shape.free >= 0 and not federation.met_no_room:
        tally.not_reached.append(f"{planned}: the disk was not too full for anything")
    tally.add(planned, federation, verdict)


def at_random(tally: Tally, num_kills: int, seed: int, shape: Shape) -> None:
    """Run with kills from outside, until this number of kills is reached."""
    number, done = 0, 0
    while done < num_kills and number < num_kills:
        number += 1
        rng, name = random.Random(f"{seed}/{number}"), f"seed {seed}, run {number}"
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            kinds = (shape, replace(shape, divided=DIVIDED), replace(shape, mesh=MESH))
            federation = Federation(Path(folder), kinds[number % len(kinds)])
            if federation.shape.mesh not in tally.models:
                tally.models[federation.shape.mesh] = undisturbed(federation.shape)
            try:
                verdict = federation.run(Killer(rng, min(KILLS_A_RUN, num_kills - done), PAUSE_S))
            except NotMeasured as error:
                tally.failed(name, error)
                continue
        done += federation.num_kills
        tally.add(f"{name}, {federation.num_kills} kills ({done} of {num_kills})", federation, verdict)


def schedule() -> list[str]:
    """Return every tested visit of every step."""
    steps = [step for step, _ in STEPS if not step.startswith(ELSEWHERE)]
    whole = [f"{step}:{n}" for step in steps if step not in ONLY_IN_PARTS for n in COUNTS.get(step, (1, 2))]
    parted = [f"{step}:{n}{IN_PARTS}" for step, visits in PARTED.items() for n in visits]
    meshed = [f"{step}:{n}" for step, visits in MESHED.items() for n in visits]
    for step in (step for step, _ in rank_crash_points.STEPS if step not in rank_crash_points.OF_SUMS):
        meshed += [f"{step}:{n} {rank}" for rank in (0, 1) for n in RANKS_MESHED.get(step, (1,))]
    return whole + parted + [planned + IN_A_MESH for planned in (*meshed, *HANGS)]


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crash_matrix", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="a few steps, and one run of kills from outside")
    parser.add_argument("--secure", action="store_true", help="updates in secure sums")
    parser.add_argument("--kills", type=int, help="number of kills from outside, at random times")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random times")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="STEP",
        help="test only these steps (step, step:n, of a rank 'step:n 1'; then, perhaps, ' + parts' or ' + mesh'; with "
        "--secure also ' + ranks', ...)",
    )
    parser.add_argument("--part", default="1/1", metavar="K/N", help="test every N-th step from the K-th: a share of N")
    arguments = parser.parse_args()
    first, _, every = arguments.part.partition("/")
    of_part = slice(int(first) - 1, None, int(every or 1))
    keep_bytecode()
    if arguments.secure:
        rows = arguments.only or (QUICK_SECURE if arguments.quick else secure_deaths.rows())
        if any(secure_deaths.read(row)[1] & FREE_BYTES.keys() for row in rows):
            enter_namespace()
        return of_sums(rows[of_part])
    default = NUM_KILLS_QUICK if arguments.quick else 0 if arguments.only else NUM_KILLS
    num_kills = default if arguments.kills is None else arguments.kills
    shape = Shape(rounds=3, num_elements=600_000) if arguments.quick else Shape()
    tally = Tally({"": undisturbed(shape)})
    planned = arguments.only or (QUICK if arguments.quick else schedule())
    planned = planned[of_part]
    say(f"{len(planned)} deaths at named steps")
    for crash_at in planned:
        at_step(tally, crash_at, shape)
    say(f"{num_kills} kills from outside")
    at_random(tally, num_kills, arguments.seed, shape)
    return conclude(
        "crash_matrix",
        bars_of(tally),
        ours=ours_of(tally, planned, num_kills, arguments.seed, shape),
        theirs=None,
        why_not="no peer continues a round after the death of its server: there is nothing to compare with",
    )


def of_sums(planned: Sequence[str]) -> int:
    """Measure the deaths in runs with secure sums, and print the result."""
    shape, tally = Shape(rounds=3, num_elements=400_000), Tally({})
    say(f"{len(planned)} runs with secure sums")
    for deaths in planned:
        in_a_sum(tally, deaths, shape)
    return conclude(
        "crash_matrix",
        bars_of(tally),
        ours=ours_of(tally, planned, 0, 0, shape, agents="4 or 5 agents in secure sums"),
        theirs=None,
        why_not="no peer continues a round after the death of its server: there is nothing to compare with",
    )


def bars_of(tally: Tally) -> list[Bar]:
    """Return the bars: no update lost or counted twice, all bits equal, and every step tested."""
    healed = [recovery.back_s for recovery in tally.recoveries if recovery.of == RANK and recovery.back_s is not None]
    return [
        Bar.exactly("lost", len(tally.lost), 0),
        Bar.exactly("twice", len(tally.twice), 0),
        Bar.exactly("same_bits [runs]", tally.num_same, tally.num_runs),
        Bar.exactly("runs that did not finish, or abandoned a round", len(tally.unfinished), 0),
        Bar.exactly("named steps that were not reached", len(tally.not_reached), 0),
        *([Bar.at_most("a rank's death to the next step, median [s]", median(healed), HEAL_MAX_S)] if healed else []),
    ]


def ours_of(
    tally: Tally, planned: Any, num_kills: int, seed: int, shape: Shape, agents: str = "3 agents"
) -> dict[str, Any]:
    """Return the figures beside the bars."""
    recovery = {}
    for who, names in (("coordinator", (COORDINATOR,)), ("agent", SITES), ("rank", (RANK,))):
        mine = [r for r in tally.recoveries if r.of in names]
        for kind in ("back_s", "commit_s"):
            if seconds := [s for r in mine if (s := getattr(r, kind)) is not None]:
                recovery[f"{who}_{kind}"] = {**spread(seconds), "count": len(seconds)}
    faults = {"lost": tally.lost, "twice": tally.twice, "unfinished": tally.unfinished, "missed": tally.not_reached}
    return {
        "runs": tally.num_runs,
        "deaths": tally.num_kills,
        "at_steps": len(planned),
        "from_outside": num_kills,
        "seed": seed,
        "seconds_to_recover": recovery,
        "faults": {name: found for name, found in faults.items() if found},
        "configuration": f"{agents}, {shape.rounds} rounds, {4 * shape.num_elements / 1e6:g} MB, "
        f"uploads at {shape.upload_limit / 1e6:g} MB/s, whole cohort",
    }


if __name__ == "__main__":
    sys.exit(main())

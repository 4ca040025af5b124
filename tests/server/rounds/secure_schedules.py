"""Schedules of secure rounds: crashes of both sides, lost streams, messages in any order and twice, plain and mesh.

python -m tests.server.rounds.secure_schedules --seeds 10000          # as `make soak`; prints what happened
python -m tests.server.rounds.secure_schedules --first 17 --seeds 1   # repeats one
"""

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from unittest.mock import patch

from atoll.client.secure import member
from atoll.client.secure.promises import Kind
from atoll.protocol.secure.site_key import is_signed
from atoll.protocol.vocabulary import RunState
from atoll.server.sessions import session
from benchmarks.sums_evidence import faults_of_promises
from tests.server.rounds.secure_federation import SecureRun

MEMBERS = (*range(3, 13), *range(3, 7))
AT_ONCE = 50


class BadSchedule(AssertionError):
    """A schedule that breaks a promise of secure sums; the message has the seed that repeats it."""


def judged(seed: int) -> Counter[object]:
    """Run the schedule of a seed to its end, and count what happened.

    Raises:
        BadSchedule: a sum is wrong or of too few, a pad or an attempt was used twice, or the run has no clean end.
    """
    draw = random.Random(f"secure schedule {seed}")
    count = draw.choice(MEMBERS)
    run = SecureRun(
        count,
        draw,
        faults=draw.choice([0.0, 0.02, 0.05, 0.1]),
        rounds=draw.choice([1, 1, 1, 2]),
        meshes=draw.choice([0.0, 0.5, 1.0]),
        quorum=draw.choice([1, 1, 2, 3]),
        sessions=draw.choice([1, 1, 2, 3]),
        session_max=draw.choice([64, 64, 5]),
        attempts=draw.randint(1, 3),
        threshold=draw.choice(["two_thirds", "two_thirds", str(count)]),
    )
    try:
        run.run()
        _check(run)
    except Exception as error:  # nothing narrower: a machine may raise anything
        command = f"python -m tests.server.rounds.secure_schedules --first {seed} --seeds 1"
        raise BadSchedule(f"seed={seed}: {type(error).__name__}: {error}\nagain: {command}") from error
    seen: Counter[object] = Counter(
        {run.machine.ledger.state: 1, "attempts": run.num_attempts, "sums": len(run.opened)}
    )
    seen.update("crash" for _ in range(run.num_crashes))
    seen.update("mesh" for cuts in run.cuts.values() if cuts)
    seen.update(run.refused)
    seen.update(reason.partition(":")[0] for reason in run.reasons)
    return seen


def _check(run: SecureRun) -> None:
    """Check what no step of the run has: its end, its records, and the promises of its sites."""
    assert run.machine.ledger.state in (RunState.FINISHED, RunState.FAILED, RunState.PAUSED), "no clean end"
    past = run.machine.ledger.past  # the last rounds
    used = {(number, name) for number, record in past.items() for name, row in record.clients.items() if row.used_in}
    opened = {(number, name) for number, _, names in run.opened for name in names if number in run.committed}
    assert used == {each for each in opened if each[0] in past}, f"{used} are used, and {opened} are in opened sums"
    for site in run.sites.values():
        given = [(str(p.kind), p.run, p.round, p.attempt) for p in site.written]
        assert not (faults := faults_of_promises(given)), f"{site.name}: {faults}"
        signed = [p.round for p in site.written if p.kind is Kind.SIGNED]
        assert len(signed) == len({*signed}), f"{site.name} has signed twice in one round"


@contextmanager
def verified_once() -> Iterator[None]:
    """Verify each signature once, as all members of a session check the same ones; half of a schedule's time."""
    once = lru_cache(maxsize=10_000)(is_signed)
    with patch.object(member, "is_signed", once), patch.object(session, "is_signed", once):
        yield


def judged_all(seeds: Sequence[int]) -> Counter[object]:
    """Judge several schedules, and count what happened in them."""
    seen: Counter[object] = Counter()
    with verified_once():
        for seed in seeds:
            seen += judged(seed)
    return seen


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge many schedules on all processors; return 1 at the first bad one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="number of schedules")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="number of processes")
    asked = parser.parse_args(arguments)
    begun, end = time.perf_counter(), asked.first + asked.seeds
    parts = [range(first, min(first + AT_ONCE, end)) for first in range(asked.first, end, AT_ONCE)]
    seen: Counter[object] = Counter()
    with multiprocessing.get_context("spawn").Pool(min(asked.jobs, len(parts))) as pool:
        try:
            for found in pool.imap_unordered(judged_all, parts):
                seen += found
        except BadSchedule as bad:
            print(bad, file=sys.stderr)
            return 1
    print(f"{asked.seeds} schedules, none wrong, {asked.seeds / (time.perf_counter() - begun):.0f} a second")
    print(", ".join(f"{what} {number}" for what, number in seen.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

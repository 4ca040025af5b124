"""`python -m tests.fuzz`: many millions of mutated inputs for every parser, on all cores.

python -m tests.fuzz --inputs 10000000 --seed 7 --jobs 2
python -m tests.fuzz --target "join code" --replay BASE64
"""

import argparse
import base64
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence

from tests.fuzz.mutate import BLOCK
from tests.fuzz.run import Found, Part, feed, feed_part
from tests.fuzz.targets import TARGETS

PART = 20 * BLOCK


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000, help="of each parser; a multiple of 1,000")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="by default a new one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this parser; repeatable")
    parser.add_argument("--replay", help="one input, base64, for one --target")
    asked = parser.parse_args(arguments)
    names = asked.target or list(TARGETS)
    if asked.replay is not None:
        return replay(names[0], base64.b64decode(asked.replay))
    print(f"{asked.inputs:,} inputs for each of {len(names)} parsers, --seed {asked.seed}", flush=True)
    with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
        return max([search(pool, name, asked.seed, asked.inputs) for name in names])


def search(pool: "multiprocessing.pool.Pool", name: str, seed: int, count: int) -> int:
    """Feed one parser; 1 when something was found."""
    began, accepted, refused = time.monotonic(), 0, 0
    for outcome in pool.imap_unordered(feed_part, parts(name, seed, count)):
        if isinstance(outcome, str):
            print(outcome, flush=True)
            return 1
        accepted, refused = accepted + outcome.accepted, refused + outcome.refused
    seconds = time.monotonic() - began
    rate = (accepted + refused) / seconds
    print(f"{name:32} {accepted:>12,} accepted {refused:>12,} refused {seconds:9.1f} s {rate:10,.0f}/s", flush=True)
    return 0


def parts(name: str, seed: int, count: int) -> Iterator[Part]:
    """What one process does at a time."""
    for begin in range(0, count, PART):
        yield name, seed, begin, min(begin + PART, count)


def replay(name: str, data: bytes) -> int:
    """One input again, in this process."""
    try:
        print(feed(name, [data]))
    except Found as found:
        print(found)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

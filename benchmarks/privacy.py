"""Discrete Gaussian samples beside OpenDP's exact sampler, and the time of an exact epsilon.

    python -m benchmarks.privacy [--samples N] [--turns N]

Both sides draw from the same distribution, with the deviation of a private sum (2^30 to 2^31 steps), in turns, on one
thread. The other side draws a vector at once, as its users do; ours draws blocks of 16,384 with a key each, as a fold
does. Times are the processor's.
"""

import argparse
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

from atoll.aggregation.noise.private_sum import PrivateSum
from atoll.protocol.privacy.gaussian import epsilon_of, mu_of, noise_multiplier_of
from atoll.tensors.noise.grid_noise import BLOCK
from benchmarks.report import Bar, conclude, say, spread

PEER = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"
DEVIATION = 1.4
"""In units of the clip norm: 1.4 x 2^30 steps of the grid."""
SPEEDUP, QUERY_MS = 20.0, 1.0
QUERIES = 1000


def ours(samples: int) -> float:
    """Return the nanoseconds of one sample."""
    begun = time.process_time()
    PrivateSum(DEVIATION, 1, bytes(32)).noise("w", samples, 0, samples)
    return (time.process_time() - begun) / samples * 1e9


def query_ms() -> float:
    """Return the milliseconds of one epsilon, or one noise multiplier: the slower."""
    found = []
    for ask in (
        lambda k: epsilon_of(mu_of([(0.3 + 0.01 * k, 1 + k)]), 1e-6),
        lambda k: noise_multiplier_of(0.1 + 0.01 * k, 1e-6, 1 + k),
    ):
        begun = time.process_time()
        for k in range(QUERIES):
            ask(k)
        found.append((time.process_time() - begun) / QUERIES * 1e3)
    return max(found)


def theirs(samples: int) -> "subprocess.Popen[str] | None":
    """Return the other side, ready to draw; None: it is not installed."""
    command = [PEER, Path(__file__).with_name("peer_opendp.py"), str(DEVIATION * 2.0**30), str(samples)]
    if not PEER.exists():
        return None
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process if process.stdout.readline() == "ready\n" else None


def main() -> int:
    """Measure, and print the last line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=40 * BLOCK)
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    fewer, peer = given.samples // 20, theirs(given.samples // 20)
    ours_ns, theirs_ns, queries = [], [], []
    for _ in range(given.turns):
        ours_ns.append(ours(given.samples))
        queries.append(query_ms())
        if peer is not None:
            assert peer.stdin is not None
            assert peer.stdout is not None
            peer.stdin.write("\n")
            peer.stdin.flush()
            theirs_ns.append(float(peer.stdout.readline()))
        say(
            f"sample {ours_ns[-1]:.0f} ns, theirs {theirs_ns[-1] if theirs_ns else 0:.0f} ns; "
            f"epsilon {queries[-1]:.3f} ms"
        )
    if peer is not None:
        assert peer.stdin is not None
        peer.stdin.close()
        peer.wait()
    bars = [Bar.at_most("exact epsilon or noise multiplier [ms]", median(queries), QUERY_MS)]
    if theirs_ns:
        bars.append(Bar.at_least("samples: speed, times OpenDP's", median(theirs_ns) / median(ours_ns), SPEEDUP))
    mine: dict[str, Any] = {"sample_ns": spread(ours_ns, 1), "samples": given.samples, "query_ms": spread(queries, 4)}
    other = {"sample_ns": spread(theirs_ns, 1), "samples": fewer} if theirs_ns else None
    return conclude("privacy", bars, ours=mine, theirs=other, why_not="no opendp in .venv-peers: make peers")


if __name__ == "__main__":
    raise SystemExit(main())

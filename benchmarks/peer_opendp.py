"""The other side of `privacy`: OpenDP's exact discrete Gaussian, run by the Python of .venv-peers.

    .venv-peers/bin/python benchmarks/peer_opendp.py DEVIATION COUNT

For each line of standard input it draws COUNT samples at once, in one vector, and prints the nanoseconds of the
processor for each sample. It has no code of Atoll's.
"""

import sys
import time

import opendp.prelude as dp


def main() -> None:
    """Draw on demand, until standard input ends."""
    deviation, count = float(sys.argv[1]), int(sys.argv[2])
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
    draw, zeros = dp.m.make_gaussian(*space, scale=deviation), [0] * count
    print("ready", flush=True)
    for _ in sys.stdin:
        begun = time.process_time()
        samples = draw(zeros)
        seconds = time.process_time() - begun
        assert len(samples) == count
        print(seconds / count * 1e9, flush=True)


if __name__ == "__main__":
    main()

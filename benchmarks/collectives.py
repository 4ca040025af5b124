"""The collectives by hand against gloo's: equal results, the bytes of theory, and the time of each.

    python -m benchmarks.collectives [--ranks N] [--pairs N] [--kib N ...]

Ours are the readable ones of `examples/teaching/collectives`, over isend and irecv on loopback. They are for teaching:
there is no bar on time. The other side may cut a tensor into pieces that travel at the same time; the best number of
pieces is found first, for each collective. A time is that of the slowest rank, from a barrier on.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import Bar, conclude, say, spread
from examples.teaching.collectives import parameter_server, ring, trees
from examples.teaching.collectives.wire import Wire
from tests.parallel.forked import run_ranks

KIB = (4, 64, 1024, 16384)
PIECES = (1, 2, 4)
"""The numbers of pieces to try on the other side."""

ROUNDS = 5
"""The number of rounds of the parameter server."""

Side = Callable[[torch.Tensor], torch.Tensor | None]


def ours(wire: Wire) -> dict[str, Side]:
    return {
        "all-reduce (ring)": partial(ring.all_reduce, wire),
        "reduce-scatter (ring)": partial(ring.reduce_scatter, wire),
        "all-gather (ring)": partial(ring.all_gather, wire),
        "broadcast (pipeline)": partial(ring.broadcast, wire, root=0),
        "broadcast (naive)": partial(trees.broadcast_naive, wire, root=0),
        "broadcast (tree)": partial(trees.broadcast_tree, wire, root=0),
        "reduce (naive)": partial(trees.reduce_naive, wire, root=0),
        "reduce (tree)": partial(trees.reduce_tree, wire, root=0),
    }


def theory(name: str, rank: int, num_ranks: int, num_bytes: int) -> float:
    """Return the bytes that a rank sends, for a tensor of `num_bytes` on each rank; rank 0 is the root."""
    others, right = num_ranks - 1, (rank + 1) % num_ranks
    match name:
        case "all-reduce (ring)":
            return 2 * others / num_ranks * num_bytes
        case "reduce-scatter (ring)":
            return others / num_ranks * num_bytes
        case "all-gather (ring)":
            return others * num_bytes
        case "broadcast (pipeline)":
            return 0 if right == 0 else num_bytes
        case "broadcast (naive)":
            return 0 if rank else others * num_bytes
        case "reduce (naive)" | "reduce (tree)":
            return num_bytes if rank else 0
    children = sum(1 for bit in range(num_ranks.bit_length()) if rank < 1 << bit and rank + (1 << bit) < num_ranks)
    return children * num_bytes


def gloo(name: str, tensor: torch.Tensor, num_pieces: int) -> torch.Tensor | None:
    """Run the library's collective in `num_pieces` pieces at a time."""
    kind, result = name.split(" ")[0], tensor.clone()
    pieces = result.tensor_split(num_pieces)
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    match kind:
        case "all-reduce":
            works = [dist.all_reduce(piece, async_op=True) for piece in pieces]
        case "broadcast":
            works = [dist.broadcast(piece, 0, async_op=True) for piece in pieces]
        case "reduce":
            works = [dist.reduce(piece, 0, async_op=True) for piece in pieces]
        case "reduce-scatter":
            part = torch.empty_like(result[: len(result) // num_ranks])
            parts = [list(chunk.tensor_split(num_pieces)) for chunk in result.tensor_split(num_ranks)]
            ends = part.tensor_split(num_pieces)
            works = [dist.reduce_scatter(end, [p[i] for p in parts], async_op=True) for i, end in enumerate(ends)]
            result = part
        case _:
            rows = result.new_empty(num_ranks, len(result))
            columns = [row.tensor_split(num_pieces) for row in rows]
            works = [dist.all_gather([c[i] for c in columns], piece, async_op=True) for i, piece in enumerate(pieces)]
            result = rows
    for work in works:
        work.wait()
    return None if kind == "reduce" and rank else result


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    taken = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def measured(name: str, num_elements: int, pairs: int) -> dict[str, Any]:
    """Measure one collective at one size, on one rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensor = torch.randint(-1000, 1000, (num_elements,), generator=generator).float()  # sums are exact in any order
    sweep = {n: median(seconds(partial(gloo, name, tensor, n)) for _ in range(5)) for n in PIECES}
    best = min(sweep, key=lambda n: sweep[n])
    wire = Wire()
    mine, other = ours(wire)[name](tensor), gloo(name, tensor, best)
    is_equal = mine is other is None or (mine is not None and other is not None and torch.equal(mine, other))
    sent, our_s, their_s = wire.bytes_sent, list[float](), list[float]()
    for _ in range(pairs):
        our_s.append(seconds(partial(ours(Wire())[name], tensor)))
        their_s.append(seconds(partial(gloo, name, tensor, best)))
    wanted = theory(name, dist.get_rank(), dist.get_world_size(), tensor.nbytes)
    return {"is_equal": is_equal, "sent": sent, "wanted": wanted, "ours": our_s, "theirs": their_s, "pieces": best}


def served(num_elements: int) -> int:
    """Return the bytes that one rank sends and receives with a synchronous parameter server."""
    wire, weights = Wire(), torch.zeros(num_elements)
    if wire.rank == parameter_server.SERVER:
        parameter_server.serve(wire, weights, num_rounds=ROUNDS, lr=0.1)
    else:
        parameter_server.work(wire, weights, num_rounds=ROUNDS, gradient_of=torch.ones_like)
    return wire.bytes_sent + wire.bytes_received


def on_a_rank(sizes: list[int], pairs: int) -> tuple[dict[tuple[str, int], Any], list[int]]:
    found = {(name, size): measured(name, size, pairs) for name in ours(Wire()) for size in sizes}
    return found, [served(size) for size in sizes]


def byte_bars(ranks: Sequence[dict[tuple[str, int], Any]]) -> list[Bar]:
    """Return bars on equal results, and on each collective's largest deviation from the bytes of theory."""
    apart: dict[str, float] = {}
    for found in ranks:
        for (name, _), one in found.items():
            apart[name] = max(apart.get(name, 0), abs(one["sent"] - one["wanted"]))
    others = sum(not one["is_equal"] for found in ranks for one in found.values())
    bars = [Bar.exactly(f"{name}: bytes from a rank, away from theory", most, 0) for name, most in apart.items()]
    return [Bar.exactly("results that differ from gloo's", others, 0), *bars]


def times(found: dict[tuple[str, int], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the times of ours and theirs, by collective and size."""
    ours_ms: dict[str, Any] = {}
    theirs_ms: dict[str, Any] = {}
    for (name, size), one in found.items():
        label, pieces = f"{4 * size // 1024} KiB", one["pieces"]
        mine, other = (spread([1e3 * s for s in one[side]]) for side in ("ours", "theirs"))
        ours_ms.setdefault(name, {})[label] = {"ms": mine}
        theirs_ms.setdefault(name, {})[label] = {"ms": other, "pieces": pieces}
        say(f"{name}, {label}: {mine['median']:.2f} ms, gloo {other['median']:.2f} ms in {pieces} pieces")
    return ours_ms, theirs_ms


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=7, help="measurements of each side, interleaved")
    parser.add_argument("--kib", type=int, nargs="+", default=KIB, help="sizes of the tensor on each rank [KiB]")
    arguments = parser.parse_args()
    num_ranks, pairs = arguments.ranks, arguments.pairs
    if num_ranks < 2:
        parser.error(f"--ranks: got {arguments.ranks}; allowed: at least 2")
    sizes = [math.ceil(256 * kib / num_ranks) * num_ranks for kib in arguments.kib]
    ranks, ports = zip(*run_ranks(on_a_rank, num_ranks, sizes, pairs, timeout_s=1800), strict=True)
    wanted = [ROUNDS * 2 * (num_ranks - 1) * 4 * size for size in sizes]
    apart = max(abs(port - wish) for port, wish in zip(ports[parameter_server.SERVER], wanted, strict=True))
    server = Bar.exactly("parameter server: bytes through its port, away from 2 N M in a round", apart, 0)
    mine, other = times(ranks[0])
    shared = {"ranks": num_ranks, "pairs": pairs, "interface": "loopback"}
    return conclude(
        "collectives",
        [*byte_bars(ranks), server],
        ours=shared | {"by_hand": mine},
        theirs=shared | {"torch": torch.__version__, "gloo": other},
    )


if __name__ == "__main__":
    sys.exit(main())

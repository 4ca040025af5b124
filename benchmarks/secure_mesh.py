"""Masks of a mesh client beside those of a plain one: boxes of tensor parallelism, ranks, memory.

    python -m benchmarks.secure_mesh [--values N] [--turns N]

n = 20 members, 32 bits, from file to file. First one box of columns, as a rank of a tensor-parallel layer owns them,
beside a box of as many words that follow each other. Then a whole update of three matrices: encoded and masked by a
plain client in one process, and by two ranks of a mesh that own rows (`dp_shard`) or columns (`tp`), over a gloo group,
with every exchange of theirs. Times are the processor's, the shortest of some turns; memory is the largest resident
size over that at the start of the phase.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from atoll.tensors import safetensors_file
from atoll.tensors.layout import Layout, Piece, Tensor
from atoll.tensors.masked.encode import encode_update
from atoll.tensors.masked.mask import mask_part, mask_update
from atoll.tensors.pieces import part_name
from atoll.tensors.secure.plan import Vector
from benchmarks.large_client import watched
from benchmarks.report import Bar, conclude, say
from benchmarks.secure_mask import MEMBERS, best, plan_of, streams_of
from tests.parallel.forked import run_ranks

RUNS = (64, 100, 255, 256, 1024, 4096, 5000)
"""Lengths of the runs of a box of columns [words]; some are no multiples of a block."""
RANKS = 2
ROUNDING = bytes(range(32)).hex()
KINDS = {"rows": 0, "columns": 1}
"""The axis that ranks divide, by the kind of the mesh."""


def layout_of(values: int) -> Layout:
    """Return three matrices of about this many values together."""
    side = max(64, int((values / 3) ** 0.5) // 64 * 64)
    return tuple(Tensor(name, "F32", (side, side)) for name in ("k", "o", "q"))


def boxes(folder: Path, words: int, turns: int) -> dict[str, float]:
    """Return the seconds of masking a box of columns, by the length of its runs; and of contiguous words."""
    streams, found = streams_of(MEMBERS), {}
    (folder / "words").write_bytes(np.random.default_rng(1).bytes(4 * words))
    for run in RUNS:
        rows = words // run
        layout = (Tensor("w", "I32", (rows, 3 * run)),)
        sides = {str(run): Piece("w", "I32", (0, run), (rows, run), ""), f"{run} whole": None}
        for name, box in sides.items():
            if box is None:  # as many words of rows
                layout, box = (Tensor("w", "I32", (3 * rows, run)),), Piece("w", "I32", (rows, 0), (rows, run), "")

            def mask(layout: Layout = layout, box: Piece = box) -> None:
                mask_part(folder / "words", folder / "masked", layout, [box], streams)

            found[name] = best(mask, turns)
    return found


def box_of(tensor: Tensor, axis: int, rank: int) -> Piece:
    """Return a rank's box of a tensor that is divided along an axis."""
    share, offsets, lengths = tensor.shape[axis] // RANKS, [0] * len(tensor.shape), list(tensor.shape)
    offsets[axis], lengths[axis] = rank * share, share
    return Piece(tensor.name, tensor.dtype, tuple(offsets), tuple(lengths), "")


def slices(box: Piece) -> tuple[slice, ...]:
    """Return the place of a box in its tensor."""
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))


class Phases:
    """The times and the memory of the phases of one process; of several turns the least time, and the most memory."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}

    def of(self, name: str, work: Callable[[], Any]) -> Any:
        """Carry out one phase."""
        with watched() as peak:
            begun = time.process_time()
            found = work()
            seconds = time.process_time() - begun
        self.seconds[name] = min(seconds, self.seconds.get(name, seconds))
        self.bytes[name] = max(peak.over_start, self.bytes.get(name, 0))  # later turns find memory that is there
        return found


def on_a_rank(folder: str, values: int, kind: str, keys: Sequence[tuple[str, int]], turns: int) -> Any:
    """Return the phases of this rank, and rank 0's pieces of the masked parts."""
    from atoll.parallel.checkpoint.ranks import Ranks
    from atoll.parallel.mesh_client.secure_words import encode_parts, mask_parts
    from atoll.training.worker.operations import piece_fields

    here, ranks, layout, phases = Path(folder), Ranks(), layout_of(values), Phases()
    plan, vector = plan_of(layout), Vector(layout, plan_of(layout))
    order = {"out": str(here / f"{kind}.words"), "rounding": ROUNDING}
    update = safetensors_file.mapped(here / "update")
    mine = [box_of(tensor, KINDS[kind], ranks.rank) for tensor in layout]
    parts = [piece_fields(tuple(box_of(tensor, KINDS[kind], rank) for tensor in layout)) for rank in range(RANKS)]
    plain, masked = here / f"{kind}.plain", here / f"{kind}.masked"
    masked.mkdir(exist_ok=True)
    for _ in range(turns):
        plain.mkdir(exist_ok=True)
        (plain / part_name(ranks.rank)).write_bytes(
            b"".join(np.ascontiguousarray(update[box.tensor][slices(box)]).tobytes() for box in mine)
        )
        ranks.gather(None)
        encoded = phases.of("encode", lambda: encode_parts(order, here / "update", plain, parts, plan, ranks))
        request = {
            "layout": [(tensor.name, tensor.dtype, tensor.shape) for tensor in vector.masked],
            "parts": [
                {
                    "encoded": str(Path(order["out"]) / part_name(index)),
                    "out": str(masked / part_name(index)),
                    "pieces": pieces,
                }
                for index, pieces in enumerate(encoded["parts"])
            ],
        }
        answer = phases.of("mask", partial(mask_parts, request, keys if ranks.is_first else (), ranks))
    return phases.seconds, phases.bytes, answer["parts"]


def wrong_words(folder: Path, kind: str, parts: Sequence[Any]) -> int:
    """Return the number of words of a mesh that differ from the plain client's masked file."""
    from atoll.parallel.mesh_client.secure_words import pieces_in

    whole, wrong, seen = safetensors_file.mapped(folder / "masked"), 0, 0
    for index, fields in enumerate(parts):
        raw, position = (folder / f"{kind}.masked" / part_name(index)).read_bytes(), 0
        for box in pieces_in(fields):
            words = np.frombuffer(raw, whole[box.tensor].dtype, box.num_elements, position).reshape(box.lengths)
            wrong += int(np.count_nonzero(words != whole[box.tensor][slices(box)]))
            position, seen = position + box.num_bytes, seen + box.num_elements
    return wrong + sum(array.size for array in whole.values()) - seen


def plain_client(folder: str, values: int, keys: Sequence[tuple[str, int]], turns: int) -> Any:
    """Return the phases of a client in one process."""
    here, layout, phases = Path(folder), layout_of(values), Phases()
    streams, masked = [(bytes.fromhex(key), sign) for key, sign in keys], Vector(layout, plan_of(layout)).masked
    rounding = bytes.fromhex(ROUNDING)

    def encode() -> None:
        encode_update(here / "update", here / "words", layout=layout, plan=plan_of(layout), rounding=rounding)

    for _ in range(turns):
        phases.of("encode", encode)
        phases.of("mask", lambda: mask_update(here / "words", here / "masked", masked, streams))
    return phases.seconds, phases.bytes


def figures(folder: Path, values: int, turns: int) -> Iterator[tuple[str, Any]]:
    """Yield the figures of a plain client, and of each mesh."""
    draw = np.random.default_rng(2)
    arrays = {tensor.name: draw.normal(0, 1e-4, tensor.shape).astype(np.float32) for tensor in layout_of(values)}
    safetensors_file.write(folder / "update", arrays, durable=False)
    keys = [(key.hex(), sign) for key, sign in streams_of(MEMBERS)]
    ((seconds, num_bytes),) = run_ranks(plain_client, 1, str(folder), values, keys, turns)
    yield "plain", {"seconds": seconds, "bytes": num_bytes}
    for kind in KINDS:
        found = run_ranks(on_a_rank, RANKS, str(folder), values, kind, keys, turns)
        say(f"  {kind}: {json.dumps([of_rank[:2] for of_rank in found])}")
        yield (
            kind,
            {
                "seconds": {name: max(of_rank[0][name] for of_rank in found) for name in seconds},
                "bytes": {name: max(of_rank[1][name] for of_rank in found) for name in num_bytes},
                "wrong": wrong_words(folder, kind, found[0][2]),
            },
        )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--values", type=int, default=12_000_000, help="of the update")
    parser.add_argument("--words", type=int, default=1_000_000, help="of a box of columns")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        of_boxes = boxes(Path(name), options.words, options.turns)
        of_clients = dict(figures(Path(name), options.values, options.turns))
    times = {run: of_boxes[str(run)] / of_boxes[f"{run} whole"] for run in RUNS}
    plain = of_clients.pop("plain")
    bars = [
        Bar.at_most("columns in runs of 64 words and more, times contiguous words: the worst", max(times.values()), 4)
    ]
    for kind, mesh in of_clients.items():
        share = mesh["seconds"]["mask"] * RANKS / plain["seconds"]["mask"]
        more = mesh["bytes"]["mask"] - plain["bytes"]["mask"]
        bars += [
            Bar.exactly(f"{kind}: words that are not the plain client's", mesh["wrong"], 0),
            Bar.at_most(f"{kind}: the slowest rank's masking, times its share of a plain client's", share, 4),
            Bar.at_most(f"{kind}: memory of masking over a plain client's [MB]", more / 1e6, 8),
        ]
    return conclude(
        "secure_mesh",
        bars,
        ours={"columns": {run: of_boxes[str(run)] for run in RUNS}, "times": times, "meshes": of_clients},
        theirs={"contiguous": {run: of_boxes[f"{run} whole"] for run in RUNS}, "plain client": plain},
    )


if __name__ == "__main__":
    sys.exit(main())

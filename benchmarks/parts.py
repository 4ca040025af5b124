"""Updates in parts against the same update as a whole: the rate of uploads, and the judgement of a very large one.

    python -m benchmarks.parts [--mb 1000] [--turns N] [--parts 1 4 8] [--folder DIR] [--quick]

A real coordinator and the agent's own code in another process (`transfers`) upload the same bytes as a whole and in
parts, in turns whose order alternates. Each upload ends with the verdict, when every byte is checked and durable. The
ratio of a turn is the seconds of the whole upload over those of the parts; the median of the turns counts. The growth
of the coordinator's memory is that of its peak since the end of the first turn, which warms up.

Then 8 updates of one matrix are folded, whole, as 8 files of its rows, and as 8 files of its columns, in which 2 KiB
follow each other: in turns, by the ratio of the seconds. All three must make the same bytes.

The last part is arithmetic without bytes: the manifests of an update of a 405-billion-parameter Llama on 64 ranks,
each with its rows of every tensor, are opened, held against the model part by part, and judged together, as a
coordinator does it on one core. Its bar is in seconds of the processor.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.means import Weighted
from atoll.aggregation.fold.streaming import fold
from atoll.protocol.manifest import UpdateManifest, parse_update
from atoll.protocol.part_manifest import PartManifest, check_part, check_parts, part_of
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.server.process_tuning import collect_seldom
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Layout, Piece, Tensor, in_order, pieces_in_order
from atoll.tensors.updates.reader import StoredUpdate
from benchmarks.data_plane import MB, Ours, Side, settle, touch
from benchmarks.processes import Processes
from benchmarks.report import Bar, conclude, say, spread

BAR_RATE, BAR_GROWTH_MB = 0.95, 64.0
BAR_PART_BYTES, BAR_ROOT_BYTES, BAR_JUDGED_S, BAR_MEMORY_MB = 300_000, 16_000, 1.0, 100.0
LAYERS, WIDTH, INNER, KEYS, WORDS = 126, 16_384, 53_248, 1_024, 128_256
RANKS = 64
CHUNK_KIB = 1024
BAR_FOLD = {"rows": 0.9, "columns": 0.25}
"""Speed of the fold of an update that is cut in this way, of that of the whole."""
NUM_UPDATES, NUM_CUTS, COLUMNS, FOLD_MB = 8, 8, 4096, 64


def rates(processes: Processes, mb: int, turns: int, counts: Sequence[int]) -> tuple[dict[int, Side], float]:
    """Return the uploads by number of parts (0: as a whole), and the growth of the coordinator's peak memory [MB]."""
    kinds = (0, *counts)
    sides, size = {kind: Side() for kind in kinds}, mb * MB
    ours = Ours(processes, "parts", size, 1, rounds=(turns + 1) * len(kinds) + 1)
    first = 0
    for number in range(turns + 1):
        into = sides if number else {kind: Side() for kind in kinds}  # the first turn warms up
        for kind in kinds if number % 2 else kinds[::-1]:
            ours.invited()  # the previous round is committed by then
            settle(processes, "parts")
            touch(processes.folder, size, CHUNK_KIB)
            before = ours.usage.cpu_s
            into[kind].add("up", ours.upload(kind), ours.usage.cpu_s - before)
        first = first or ours.usage.rss_bytes_max  # after an upload and a fold of each kind
        if number:
            whole = sides[0].seconds["up"][-1]
            turn = ", ".join(f"{kind} parts {whole / sides[kind].seconds['up'][-1]:.2f}" for kind in counts)
            say(f"turn {number}: as a whole {whole:.2f} s; of its rate in {turn}")
    growth = (ours.usage.rss_bytes_max - first) / 1e6
    ours.close()
    return sides, growth


def divided(folder: Path, number: int, rows: int) -> dict[str, Weighted]:
    """Write an update of normal numbers in each of the ways; return them by the way."""
    values = np.random.default_rng(number).standard_normal((rows, COLUMNS), dtype=np.float32)
    of_rows, of_columns = (rows // NUM_CUTS, COLUMNS), (rows, COLUMNS // NUM_CUTS)
    boxes = {
        "whole": [((0, 0), (rows, COLUMNS))],
        "rows": [((k * of_rows[0], 0), of_rows) for k in range(NUM_CUTS)],
        "columns": [((0, k * of_columns[1]), of_columns) for k in range(NUM_CUTS)],
    }
    found = {}
    for way, places in boxes.items():
        files = []
        for k, (offsets, lengths) in enumerate(places):
            files.append((folder / f"{way}-{number}-{k}", (Piece("w", "F32", offsets, lengths, ""),)))
            box = tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))
            values[box].tofile(files[-1][0])
        magnitudes = {"w": float(np.abs(values).max())}
        found[way] = Weighted(StoredUpdate.of_parts(folder / f"{way}-{number}", files, magnitudes), number + 1)
    return found


def folds(folder: Path, mb: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds of each turn's fold of updates of `mb` MB, by the way in which they are cut."""
    rows = mb * MB // (4 * COLUMNS) // NUM_CUTS * NUM_CUTS
    safetensors_file.write(folder / "base", {"w": np.zeros((rows, COLUMNS), np.float32)}, durable=False)
    updates = [divided(folder, number, rows) for number in range(NUM_UPDATES)]
    seconds: dict[str, list[float]] = {way: [] for way in updates[0]}
    for turn in range(turns + 1):
        results = set()
        for way, of_way in seconds.items() if turn % 2 else reversed(seconds.items()):
            begun = time.perf_counter()
            fold(
                folder / "base",
                [each[way] for each in updates],
                folder / "new",
                execution=Execution(os.cpu_count() or 1),
            )
            if turn:  # the first one warms up
                of_way.append(time.perf_counter() - begun)
            results.add(hashlib.sha256((folder / "new").read_bytes()).digest())
        assert len(results) == 1, "the parts make another version than the whole"
    return seconds


def of_the_whole(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the median over the turns of each way's speed, of that of the whole."""
    pairs = {way: zip(seconds["whole"], of_way, strict=True) for way, of_way in seconds.items() if way != "whole"}
    return {way: median(whole / mine for whole, mine in both) for way, both in pairs.items()}


def large_layout() -> Layout:
    """Return the tensors of a Llama of 405 billion parameters."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (WORDS, WIDTH),
        "lm_head.weight": (WORDS, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (WIDTH, WIDTH),
                "self_attn.k_proj": (KEYS, WIDTH),
                "self_attn.v_proj": (KEYS, WIDTH),
                "self_attn.o_proj": (WIDTH, WIDTH),
                "mlp.gate_proj": (INNER, WIDTH),
                "mlp.up_proj": (INNER, WIDTH),
                "mlp.down_proj": (WIDTH, INNER),
                "input_layernorm": (WIDTH,),
                "post_attention_layernorm": (WIDTH,),
            }.items()
        }
    return in_order(Tensor(name, "F32", shape) for name, shape in shapes.items())


def large_update(layout: Layout) -> tuple[bytes, list[bytes]]:
    """Return the root and the parts of an update of it, encoded: each rank has its rows of every tensor."""
    parts = []
    for rank in range(RANKS):
        pieces = []
        for name, dtype, shape in ((tensor.name, tensor.dtype, tensor.shape) for tensor in layout):
            rows, rest = shape[0] // RANKS, shape[1:]
            sha256 = hashlib.sha256(f"{rank} {name}".encode()).hexdigest()
            pieces.append(Piece(name, dtype, (rank * rows, *(0,) * len(rest)), (rows, *rest), sha256))
        parts.append(PartManifest(rank, pieces_in_order(pieces)))
    root = UpdateManifest(
        run_id=RunId("run-1"),
        round_id=RoundId(1),
        client_id=ClientId("north"),
        base_version=Version(0),
        base_digest=Digest("0" * 64),
        num_examples=1,
        work=1.0,
        pieces=(),
        parts=tuple(part.listed for part in parts),
    )
    return root.encode(), [part.encode() for part in parts]


def judged(layout: Layout, root: bytes, parts: Sequence[bytes]) -> float:
    """Open and judge every part, then all together; return the seconds of the processor."""
    begun, opened = time.process_time(), []
    for encoded in parts:
        part = part_of(parse_update(root), encoded)  # each stream opens with the root
        assert part is not None
        assert not check_part(layout, part)
        opened.append(part)
    assert not check_parts(layout, opened)
    return time.process_time() - begun


def judgement(times: int) -> tuple[list[Bar], dict[str, Any]]:
    """Return the bars and figures of the judgement without bytes."""
    collect_seldom()  # as the coordinator's process does
    layout = large_layout()
    root, parts = large_update(layout)
    seconds = [judged(layout, root, parts) for _ in range(times)]
    tracemalloc.start()
    judged(layout, root, parts)
    peak_mb = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    num_parameters = sum(tensor.num_elements for tensor in layout)
    largest = max(map(len, parts))
    say(f"{num_parameters / 1e9:.0f}e9 parameters, {RANKS} parts: {median(seconds):.2f} s, {peak_mb:.0f} MB")
    bars = [
        Bar.at_most("largest manifest of a part [bytes]", largest, BAR_PART_BYTES),
        Bar.at_most("root [bytes]", len(root), BAR_ROOT_BYTES),
        Bar.at_most("405B on 64 ranks: opened and judged [s of one core]", min(seconds), BAR_JUDGED_S),
        Bar.at_most("405B on 64 ranks: memory while it is judged [MB]", peak_mb, BAR_MEMORY_MB),
    ]
    return bars, {"parameters": num_parameters, "tensors": len(layout), "cpu_s": spread(seconds), "peak_mb": peak_mb}


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=int, default=1000, help="size of an update [MB]")
    parser.add_argument("--turns", type=int, default=7, help="number of turns, of one upload of each kind")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 4, 8], help="numbers of parts")
    parser.add_argument("--folder", type=Path, help="folder of all files; by default a temporary one")
    parser.add_argument("--quick", action="store_true", help="8 MB, one turn: a check that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mb, arguments.turns = 8, 1
    bars, large = judgement(3 if arguments.quick else 7)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=arguments.folder) as place:
        folded = of_the_whole(folds(Path(place), min(arguments.mb, FOLD_MB), arguments.turns))
    say("fold, of the whole's speed: " + ", ".join(f"{way} {ratio:.2f}" for way, ratio in folded.items()))
    bars += [
        Bar.at_least(f"fold of {NUM_CUTS} parts of {way}, of the whole's speed", ratio, BAR_FOLD[way])
        for way, ratio in folded.items()
    ]
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=arguments.folder))
        processes = stack.enter_context(Processes(Path(place)))
        sides, growth = rates(processes, arguments.mb, arguments.turns, arguments.parts)
    whole, ratios = sides[0].seconds["up"], dict[int, float]()
    for count in arguments.parts:
        ratios[count] = median(w / p for w, p in zip(whole, sides[count].seconds["up"], strict=True))
        if count > 1:  # a single part is the same stream
            bars.append(
                Bar.at_least(f"{arguments.mb} MB in {count} parts, of the whole's rate", ratios[count], BAR_RATE)
            )
    bars.append(Bar.at_most("growth of the coordinator's peak memory [MB]", growth, BAR_GROWTH_MB))
    return conclude(
        "parts",
        bars,
        ours={f"{n} parts": sides[n].summary(arguments.mb * MB) for n in arguments.parts}
        | {"of_the_whole": ratios, "fold_of_the_whole": folded, "405B": large},
        theirs={"as a whole": sides[0].summary(arguments.mb * MB)},
    )


if __name__ == "__main__":
    sys.exit(main())

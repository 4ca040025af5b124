"""Masks of secure sums, of a client, a mesh and a coordinator, and the memory of their fold, beside Flower's functions.

    python -m benchmarks.secure_mask [--values N] [--turns N] [--no-fold]

n = 20 members. The other side of masking and unmasking are Flower's own functions for SecAgg+, in the steps of its mod
and of its workflow (`flwr.common.secure_aggregation`), in memory; on both sides secrets come from shares. Ours encodes,
draws every mask from AES, and adds; file to file it also takes the norm, hashes and writes, which has no bar. The other
side of the stream is AES-256-CTR over as many zeros by the same library. Times are the processor's.

The fold adds 18 masked files of 20 members, of which two were lost after the shares, on 1, 2 and 3 ranks in threads, in
a process for each. Its memory is the largest resident size of the process, the interpreter and libraries included.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from atoll.aggregation.fold.exchange import Bytes
from atoll.aggregation.masked.fold import Session, fold_masked
from atoll.server.opening.streams import open_sum
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.masked.encode import TILE_ELEMENTS, BoxEncoder, encode_update
from atoll.tensors.masked.mask import mask_update
from atoll.tensors.ownership import owned_pieces
from atoll.tensors.pieces import cut_layout, piece_bytes_of
from atoll.tensors.safetensors_file import TensorFileWriter
from atoll.tensors.secure.keystream import Stream, Streams, add_streams_at
from atoll.tensors.secure.plan import EncodingPlan, Vector
from atoll.tensors.secure.positions import runs_between
from atoll.tensors.secure.vector import decode
from atoll.tensors.updates.reader import stored_model
from benchmarks.report import Bar, conclude, say
from tests.server.folding.secure_rounds import Members
from tests.server.sessions.small_federation import sites_of, terms_of

MEMBERS, DROPPED = 20, 2
FOLD_VALUES = (5_000_000, 25_000_000)
RANKS = (1, 2, 3)
RUNS = (64, 100, 1024, 5000)
"""Lengths of the runs of tensor-parallel boxes [words]; 100 is no multiple of a block."""


def best(work: Callable[[], Any], turns: int) -> float:
    """Return the shortest time of several runs [s of the processor]."""
    found = []
    for _ in range(turns):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return min(found)


def plan_of(layout: Sequence[Tensor]) -> EncodingPlan:
    """Return the plan of a member."""
    return EncodingPlan(bits=32, clip_norm=1.0, exponents=(0,) * len(layout), examples_max=100, num_examples=60)


def streams_of(members: int) -> list[Stream]:
    """Return the streams of one member: its own, and one with each other member."""
    return [(os.urandom(32), 1 - 2 * (number % 2)) for number in range(members)]


# ------------------------------------------------------------ one member, and the opening of a sum


def flowers_mask(values: np.ndarray[Any, Any]) -> None:
    """Mask as the client's mod of SecAgg+ does, with its default ranges."""
    from flwr.common.secure_aggregation.ndarrays_arithmetic import (
        factor_combine,
        get_parameters_shape,
        parameters_addition,
        parameters_mod,
        parameters_multiply,
        parameters_subtraction,
    )
    from flwr.common.secure_aggregation.quantization import quantize
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    words = factor_combine(600, parameters_multiply(quantize([values], 8.0, 1 << 22), 600))
    shapes = get_parameters_shape(words)
    words = parameters_addition(words, pseudo_rand_gen(os.urandom(32), 1 << 32, shapes))
    for number in range(MEMBERS - 1):
        change = parameters_addition if number % 2 else parameters_subtraction
        words = change(words, pseudo_rand_gen(os.urandom(32), 1 << 32, shapes))
    parameters_mod(words, 1 << 32)


def flowers_shares() -> list[list[bytes]]:
    """Return the shares of each member's seed that all members send when none is lost."""
    from flwr.common.secure_aggregation.crypto.shamir import create_shares

    return [create_shares(os.urandom(32), 2 * MEMBERS // 3 + 1, MEMBERS) for _ in range(MEMBERS)]


def flowers_unmask(total: list[np.ndarray[Any, Any]], shares: Sequence[list[bytes]]) -> None:
    """Unmask a sum as the workflow of SecAgg+ does when no member is lost: seeds from shares, one mask for each."""
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares
    from flwr.common.secure_aggregation.ndarrays_arithmetic import (
        factor_extract,
        get_parameters_shape,
        parameters_mod,
        parameters_subtraction,
    )
    from flwr.common.secure_aggregation.quantization import dequantize
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    shapes = get_parameters_shape(total)
    for of_member in shares:
        total = parameters_subtraction(total, pseudo_rand_gen(combine_shares(of_member), 1 << 32, shapes))
    _, words = factor_extract(parameters_mod(total, 1 << 32))
    dequantize(words, 8.0, 1 << 22)


def session_of() -> Members:
    """Return a session of 20 members, of which two were lost after they had sent their shares."""
    for seed in range(100):  # an order of the messages in which both were lost between their shares and their vectors
        sites = sites_of(MEMBERS)
        words = {site.name: np.zeros(4, np.uint32) for site in sites}
        session = Members(sites, words, terms_of(), random.Random(seed), {"site-03": 1, "site-11": 1})
        session.run()
        of = session.session
        if of is not None and (len(of.masking), len(of.survivors)) == (MEMBERS, MEMBERS - DROPPED):
            return session
    raise AssertionError("no order of the messages loses both members after their shares")


def ours_in_memory(update: np.ndarray[Any, Any], layout: Sequence[Tensor], streams: Sequence[Stream]) -> None:
    """Encode and mask as a member does, in memory and in its tiles."""
    plan = plan_of(layout)
    vector, box = Vector(tuple(layout), plan), Piece("w", "F32", (0,), update.shape, "")
    encoder, masks = (
        BoxEncoder(vector, plan, box, plan.factor(plan.weight, 1.0, vector.num_values), os.urandom(32)),
        Streams(streams),
    )
    for start in range(0, update.size, TILE_ELEMENTS):
        words = encoder.words(update[start : start + TILE_ELEMENTS], start)
        masks.add(words.view(np.uint32), start)


def ours_mask(folder: Path, layout: Sequence[Tensor], streams: Sequence[Stream]) -> None:
    """Encode and mask, file to file."""
    encode_update(folder / "update", folder / "words", layout=tuple(layout), plan=plan_of(layout))
    mask_update(folder / "words", folder / "masked", Vector(tuple(layout), plan_of(layout)).masked, streams)


def ours_unmask(total: np.ndarray[Any, Any], session: Members) -> None:
    """Open a sum that lacks two members: secrets from shares, their streams, decoding."""
    of = session.session
    opened = open_sum(of.roster, of.id, of.masking, of.survivors, session.reveals)
    Streams([(stream.key, stream.sign) for stream in opened.streams]).add(total)
    decode(total, 32, 1.0)


def raw_stream(key: bytes, size: int) -> None:
    """Make a stream by the library alone, in the chunks that suit it."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    zeros, buffer = memoryview(bytes(1 << 18)), bytearray((1 << 18) + 16)
    for at in range(0, size, 1 << 18):
        encryptor.update_into(zeros[: min(1 << 18, size - at)], buffer)


def one_member(folder: Path, values: int, turns: int) -> tuple[list[Bar], dict[str, Any], dict[str, Any]]:
    """Measure a member, the opening of a sum, the stream and boxes."""
    layout, draw = (Tensor("w", "F32", (values,)),), np.random.default_rng(1)
    update = draw.normal(0, 1e-3, values).astype(np.float32)
    safetensors_file.write(folder / "update", {"w": update}, durable=False)
    streams, key = streams_of(MEMBERS), os.urandom(32)
    session, shares = session_of(), flowers_shares()
    words = np.zeros(values, np.uint32)
    shape = [np.array([600]), np.zeros(values, np.int64)]
    ours = {
        "mask_s": best(lambda: ours_in_memory(update, layout, streams), turns),
        "mask_from_file_to_file_s": best(lambda: ours_mask(folder, layout, streams), turns),
        "mask_of_the_words_s": best(lambda: Streams(streams).add(words), turns),
        "unmask_s": best(lambda: ours_unmask(words, session), turns),
        "stream_s": best(lambda: Streams([(key, 1)]).add(words), 3 * turns),
    }
    theirs = {
        "mask_s": best(lambda: flowers_mask(update), turns),
        "unmask_s": best(lambda: flowers_unmask(shape, shares), turns),
        "stream_s": best(lambda: raw_stream(key, words.nbytes), 3 * turns),
    }
    ours["boxes"] = {run: best(lambda run=run: boxes(words, streams, run), turns) for run in RUNS}
    bars = [
        Bar.at_least("a member's masking: times Flower's", theirs["mask_s"] / ours["mask_s"], 5),
        Bar.at_least("stream and add: times AES-256-CTR alone", theirs["stream_s"] / ours["stream_s"], 0.6),
        Bar.at_least("unmasking with 2 of 20 lost: times Flower's with none", theirs["unmask_s"] / ours["unmask_s"], 8),
    ]
    worst = max(ours["boxes"].values()) / ours["mask_of_the_words_s"]
    return (
        [*bars, Bar.at_most("scattered boxes of runs of 64 words and more, times contiguous", worst, 4)],
        ours,
        theirs,
    )


def boxes(words: np.ndarray[Any, Any], streams: Sequence[Stream], run: int) -> None:
    """Mask the columns of one of three ranks of a tensor-parallel layer, in blocks as `mask_part` does."""
    rows = len(words) // run
    box, shape = Piece("w", "I32", (0, run), (rows, run), ""), (rows, 3 * run)
    for at in range(0, rows * run, 1 << 18):
        stop = min(at + (1 << 18), rows * run)
        add_streams_at(words[at:stop], streams, runs_between(box, shape, 0, at, stop))


# ------------------------------------------------------------ the fold


def make_round(folder: Path, values: int) -> None:
    """Write the files of a round: the base, 18 masked updates, and the streams that open their sum."""
    layout, draw = (Tensor("w", "F32", (values,)),), np.random.default_rng(2)
    vector = Vector(layout, plan_of(layout))
    safetensors_file.write(
        folder / "base", {"w": np.zeros(values, np.float32)}, piece_bytes=piece_bytes_of(layout), durable=False
    )
    here, opening = MEMBERS - DROPPED, []
    pads: list[list[Stream]] = [[] for _ in range(here)]
    for one in range(here):
        for other in range(one + 1, here):
            key = os.urandom(32)
            pads[one].append((key, 1))
            pads[other].append((key, -1))
        for _ in range(1 + DROPPED):  # its own, and one with each lost member
            key = os.urandom(32)
            pads[one].append((key, 1))
            opening.append((key.hex(), -1))
    update = draw.normal(0, 1e-4, values).astype(np.float32)
    safetensors_file.write(folder / "update", {"w": update}, durable=False)
    encode_update(folder / "update", folder / "words", layout=layout, plan=plan_of(layout))
    for number, streams in enumerate(pads):
        mask_update(folder / "words", folder / f"masked{number}", vector.masked, streams)
    (folder / "opening.json").write_text(json.dumps(opening))


class Threads:
    """The exchange of one rank among threads."""

    def __init__(self, rank: int, table: list[Sequence[Bytes]], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._table, self._barrier = rank, len(table), table, barrier

    def swap(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """Exchange parts through a barrier."""
        self._table[self.rank] = parts
        self._barrier.wait()
        found = [of_rank[self.rank] for of_rank in self._table]
        self._barrier.wait()
        return found


def fold_here(folder: Path, values: int, ranks: int) -> None:
    """Fold in this process; print the digests of the pieces and the largest resident size [bytes]."""
    layout = (Tensor("w", "F32", (values,)),)
    vector = Vector(layout, plan_of(layout))
    pieces = tuple(cut_layout(layout, piece_bytes_of(layout)))
    opening = tuple((bytes.fromhex(key), sign) for key, sign in json.loads((folder / "opening.json").read_text()))
    updates = [stored_model(folder / f"masked{number}") for number in range(MEMBERS - DROPPED)]
    barrier, table = threading.Barrier(ranks), [[] for _ in range(ranks)]
    for rank in range(ranks if ranks > 1 else 0):
        owned = owned_pieces(pieces, rank, ranks)
        with TensorFileWriter(folder / f"base{ranks}.{rank}", layout, pieces=owned) as writer:
            for piece in owned:
                writer.append(np.zeros(piece.num_elements, np.float32))
            writer.finish(durable=False)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak inherited from the parent

    def work(rank: int) -> list[str]:
        session = Session(0, len(updates), tuple(updates[rank::ranks]), opening)
        exchange: Any = Threads(rank, table, barrier) if ranks > 1 else None
        base = folder / (f"base{ranks}.{rank}" if ranks > 1 else "base")
        folded, _ = fold_masked(
            base, [session], folder / f"out{ranks}.{rank}", vector=vector, exchange=exchange, durable=False
        )
        return [piece.sha256 for piece in folded.pieces]

    begun = time.perf_counter()
    with ThreadPoolExecutor(ranks) as pool:
        digests = [digest for of_rank in pool.map(work, range(ranks)) for digest in of_rank]
    seconds = time.perf_counter() - begun
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    say(json.dumps({"digests": digests, "bytes": peak, "seconds": seconds}))


def folds(root: Path) -> tuple[list[Bar], dict[str, Any]]:
    """Fold two sizes on 1, 2 and 3 ranks, each in a process."""
    found: dict[tuple[int, int], Any] = {}
    for values in FOLD_VALUES:
        folder = Path(tempfile.mkdtemp(dir=root))
        make_round(folder, values)
        for ranks in RANKS:
            command = [sys.executable, "-m", "benchmarks.secure_mask", "--fold", str(folder), str(values), str(ranks)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[values, ranks] = json.loads(done.stdout.splitlines()[-1])
        for path in folder.iterdir():
            path.unlink()
    small, large = FOLD_VALUES
    others = sum(found[size, ranks]["digests"] != found[size, 1]["digests"] for size in FOLD_VALUES for ranks in RANKS)
    bars = [Bar.exactly("folds of 25M x 18 files on 1, 2, 3 ranks with other bits", others, 0)]
    for ranks in RANKS:
        times = found[large, ranks]["bytes"] / found[small, ranks]["bytes"]
        bars.append(Bar.at_most(f"memory of the fold of 25M, times that of 5M, {ranks} ranks", times, 1.1))
    figures = {
        f"{values} values, {ranks} ranks": {"bytes": each["bytes"], "seconds": round(each["seconds"], 2)}
        for (values, ranks), each in found.items()
    }
    return bars, figures


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--values", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--no-fold", action="store_true")
    parser.add_argument("--fold", nargs=3, metavar=("FOLDER", "VALUES", "RANKS"))
    options = parser.parse_args()
    if options.fold:
        fold_here(Path(options.fold[0]), int(options.fold[1]), int(options.fold[2]))
        return 0
    with tempfile.TemporaryDirectory() as name:
        bars, ours, theirs = one_member(Path(name), options.values, options.turns)
        if not options.no_fold:
            more, ours["folds"] = folds(Path(name))
            bars += more
    return conclude("secure_mask", bars, ours=ours, theirs=theirs)


if __name__ == "__main__":
    sys.exit(main())

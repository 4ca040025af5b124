"""The size, speed and error of each codec on 10 million normal values, against plain torch.

    python -m benchmarks.codecs [--chunks N] [--pairs N] [--names NAME ...]

Ours codes one chunk at a time on one thread, refuses non-finite values, and treats the bytes as untrusted. The other
side is the same rule in plain torch, on rows of one chunk each, without checks. It may use all processors, and all
chunks at once or one by one; the best setting is found first, for each codec.

Both stream: each part is encoded, decoded, compared and dropped, so that no side pays for fresh memory. GB/s are of
float32 bytes: the input of an encoder, the output of a decoder.
"""

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.tensors.codecs.chunks import chunk_bounds, decode_range, encode_chunks, encoded_bytes
from atoll.tensors.codecs.codec import CHUNK_ELEMENTS, Codec
from atoll.tensors.codecs.error_feedback import feed
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.codecs.quantization import BUCKET_ELEMENTS
from atoll.tensors.codecs.sparsification import TopK
from atoll.tensors.layout import Tensor
from benchmarks.report import Bar, conclude, say, spread

NAMES = ("bf16", "fp16", "qsgd8", "topk:0.01", "sign")
CHUNKS = 153
"""The default number of chunks, just above 10 million elements."""

BYTES = {"bf16": 0.5, "fp16": 0.5, "qsgd8": 0.252, "topk:0.01": 0.0151, "sign": 0.0313}
"""The most encoded bytes for each byte of float32."""

Array = NDArray[np.float32]
Code = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """A codec in plain torch: (rows, 65,536) float32 to its parts, and back."""

    encode: Callable[[torch.Tensor], Code]
    decode: Callable[..., torch.Tensor]


def plain(codec: Codec) -> Plain:
    """Return the other side of a codec."""
    if isinstance(codec, TopK):
        count = codec.num_kept(CHUNK_ELEMENTS)
        return Plain(lambda rows: top_k(rows, count), scattered)
    return {
        "bf16": Plain(lambda rows: (rows.to(torch.bfloat16),), lambda code: code.to(torch.float32)),
        "fp16": Plain(lambda rows: (rows.to(torch.float16),), lambda code: code.to(torch.float32)),
        "qsgd8": Plain(qsgd, lambda norms, levels: (levels * (norms / 127)).view(-1, CHUNK_ELEMENTS)),
        "sign": Plain(packed_signs, unpacked_signs),
    }[codec.name]


def top_k(rows: torch.Tensor, count: int) -> Code:
    """Return the values of largest magnitude and their indices, in any order and with any choice among equals."""
    indices = rows.abs().topk(count, dim=1, sorted=False).indices
    return rows.gather(1, indices), indices.to(torch.uint16)


def scattered(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return zeros with the values at their indices."""
    return torch.zeros(len(values), CHUNK_ELEMENTS).scatter_(1, indices.to(torch.int64), values)


def qsgd(rows: torch.Tensor) -> Code:
    """Quantize rows; a normal vector has no bucket of zeros."""
    buckets = rows.view(-1, BUCKET_ELEMENTS)
    norms = buckets.norm(dim=1, keepdim=True)
    ratios = buckets.abs() / norms * 127
    floors = ratios.floor()
    levels = floors + (torch.rand_like(ratios) < ratios - floors)
    return norms, (buckets.sign() * levels).to(torch.int8)


def packed_signs(rows: torch.Tensor) -> Code:
    """Pack the signs with numpy, as torch packs no bits."""
    bits = np.packbits((rows < 0).numpy(), axis=1, bitorder="little")
    return rows.abs().mean(dim=1, keepdim=True), torch.from_numpy(bits)


def unpacked_signs(scales: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return (1 - 2 bit) times the scale."""
    bits = torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, bitorder="little"))
    return (1 - 2 * bits.to(torch.float32)) * scales


@dataclass(slots=True)
class Measured:
    """The figures of one pass over all values."""

    encode_s: float = 0.0
    decode_s: float = 0.0
    num_bytes: int = 0
    squared_error: float = 0.0

    def add(self, times: Sequence[float], num_bytes: int, values: Any, decoded: Any) -> None:
        """Add one part: the instants of its begin, its encoding and its decoding."""
        self.encode_s += times[1] - times[0]
        self.decode_s += times[2] - times[1]
        self.num_bytes += num_bytes
        left = np.asarray(decoded) - np.asarray(values)
        self.squared_error += float(np.square(left, dtype=np.float64).sum())


def ours(codec: Codec, values: Array) -> Measured:
    """Code one chunk after the other, as an agent writes and a coordinator reads them."""
    result, rng = Measured(), np.random.default_rng(1)
    for start, stop in chunk_bounds(values.size):
        chunk = values[start:stop]
        begun = time.perf_counter()
        data = b"".join(encode_chunks(codec, chunk.size, partial(_elements, chunk), rng))
        encoded = time.perf_counter()
        decoded = decode_range(codec, chunk.size, 0, chunk.size, partial(_bytes, data))
        result.add((begun, encoded, time.perf_counter()), len(data), chunk, decoded)
    return result


def _elements(values: Array, start: int, stop: int) -> Array:
    return values[start:stop]


def _bytes(data: bytes, position: int, length: int) -> bytes:
    return data[position : position + length]


def theirs(codec: Codec, values: Array, num_threads: int, *, at_once: bool) -> Measured:
    """Code all chunks at once, or one by one."""
    rows, other, result = torch.from_numpy(values).view(-1, CHUNK_ELEMENTS), plain(codec), Measured()
    torch.set_num_threads(num_threads)
    torch.manual_seed(1)
    for part in rows.split(len(rows) if at_once else 1):
        begun = time.perf_counter()
        code = other.encode(part)
        encoded = time.perf_counter()
        decoded = other.decode(*code)
        result.add((begun, encoded, time.perf_counter()), sum(tensor.nbytes for tensor in code), part, decoded)
    return result


def best_setting(codec: Codec, values: Array) -> dict[str, Any]:
    """Return the other side's setting with the smallest sum of both times, each the best of three."""
    settings = itertools.product(sorted({1, len(os.sched_getaffinity(0))}), (True, False))
    seconds = {}
    for num_threads, at_once in settings:
        runs = [theirs(codec, values, num_threads, at_once=at_once) for _ in range(3)]
        seconds[num_threads, at_once] = min(run.encode_s for run in runs) + min(run.decode_s for run in runs)
    num_threads, at_once = min(seconds, key=lambda setting: seconds[setting])
    sweep = ", ".join(f"{t} threads {'all' if a else 'one'}: {1e3 * s:.0f} ms" for (t, a), s in seconds.items())
    say(f"{codec.name}: sweep of the other side: {sweep}")
    return {"num_threads": num_threads, "at_once": at_once}


def fed_back_s(codec: Codec, values: Array, residual: Array) -> float:
    """Return the seconds of an update with error feedback: add, encode, decode, subtract."""
    tensor, rng = Tensor("w", "F32", (values.size,)), np.random.default_rng(1)
    begun = time.perf_counter()
    for _ in feed(codec, [tensor], lambda _, a, b: values[a:b], lambda _, a, b: residual[a:b], rng):
        pass
    return time.perf_counter() - begun


def error_bound(codec: Codec) -> float:
    """Return the bound of the relative L2 error of normal values by the papers; for qsgd8, of its mean square."""
    if isinstance(codec, TopK):
        return math.sqrt(1 - codec.millionths / 1e6)
    bounds = {"bf16": 2.0**-8, "fp16": 2.0**-11, "qsgd8": math.sqrt(BUCKET_ELEMENTS) / 127, "sign": 0.61}
    return bounds[codec.name]


def measure(codec: Codec, values: Array, pairs: int) -> tuple[list[Bar], dict[str, Any], dict[str, Any]]:
    """Measure both sides in turns, `pairs` times; the first pass of each does not count."""
    setting = best_setting(codec, values)
    ours(codec, values)
    mine, other = [], []
    for _ in range(pairs):
        mine.append(ours(codec, values))
        other.append(theirs(codec, values, **setting))
    assert mine[0].num_bytes == encoded_bytes(codec, values.size)
    fed_back = [fed_back_s(codec, values, values) for _ in range(pairs)]
    our = _summary(mine, values) | {"with_feedback_gb_s": spread([values.nbytes / 1e9 / s for s in fed_back])}
    their = _summary(other, values) | setting
    bars = [
        Bar.at_most(f"{codec.name}: bytes for each of float32", our["bytes"], BYTES.get(codec.name, 1.5)),
        Bar.at_most(f"{codec.name}: relative L2 error", our["relative_error"], error_bound(codec)),
    ]
    for what in ("encode", "decode"):
        mine_gb_s, their_gb_s = our[f"{what}_gb_s"], their[f"{what}_gb_s"]
        ratio = mine_gb_s["median"] / their_gb_s["median"]
        bars.append(Bar(f"{codec.name}: {what}, GB/s ours / theirs", round(ratio, 3), ">= 1", ratio >= 1))
        say(f"{codec.name}: {what}: {mine_gb_s} against {their_gb_s} GB/s")
    return bars, our, their


def _summary(runs: list[Measured], values: Array) -> dict[str, Any]:
    norm = float(np.linalg.norm(values.astype(np.float64)))
    return {
        "bytes": round(runs[0].num_bytes / values.nbytes, 6),
        "relative_error": round(runs[0].squared_error ** 0.5 / norm, 6),
        "encode_gb_s": spread([values.nbytes / 1e9 / run.encode_s for run in runs]),
        "decode_gb_s": spread([values.nbytes / 1e9 / run.decode_s for run in runs]),
    }


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chunks", type=int, default=CHUNKS, help=f"chunks of {CHUNK_ELEMENTS} elements")
    parser.add_argument("--pairs", type=int, default=7, help="measurements of each side, interleaved")
    parser.add_argument("--names", nargs="+", default=NAMES, help="codecs to measure")
    arguments = parser.parse_args()
    values = np.random.default_rng(0).standard_normal(arguments.chunks * CHUNK_ELEMENTS, np.float32)
    bars, mine, other = [], {}, {}
    for name in arguments.names:
        found, mine[name], other[name] = measure(parse_codec(name), values, arguments.pairs)
        bars += found
    shared = {"elements": values.size, "pairs": arguments.pairs}
    return conclude(
        "codecs",
        bars,
        ours=shared | {"num_threads": 1, "codecs": mine},
        theirs=shared | {"torch": torch.__version__, "codecs": other},
    )


if __name__ == "__main__":
    sys.exit(main())

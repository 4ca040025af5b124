"""Small stored models and updates, and the slow twins that the product is compared with."""

import hashlib
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import Weighted, fold
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, pieces_in_order
from atoll.tensors.updates.reader import StoredUpdate

Arrays = Mapping[str, NDArray[Any]]
Cut = tuple[tuple[int, ...], tuple[int, ...]]

DTYPES = {"<f4": "F32", "<f2": "F16", "<u2": "BF16", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8", "|u1": "U8"}


def random_cuts(rng: np.random.Generator, shape: tuple[int, ...], *, depth: int) -> list[Cut]:
    """Cut a box at random places along random axes, `depth` times: boxes (offsets, lengths) that tile it."""
    cuts: list[Cut] = [((0,) * len(shape), shape)]
    for _ in range(depth):
        offsets, lengths = cuts.pop(int(rng.integers(len(cuts))))
        axes = [axis for axis, length in enumerate(lengths) if length > 1]
        if not axes:
            cuts.append((offsets, lengths))
            continue
        axis = int(rng.choice(axes))
        at = int(rng.integers(1, lengths[axis]))
        right = (*offsets[:axis], offsets[axis] + at, *offsets[axis + 1 :])
        cuts.append((offsets, (*lengths[:axis], at, *lengths[axis + 1 :])))
        cuts.append((right, (*lengths[:axis], lengths[axis] - at, *lengths[axis + 1 :])))
    return cuts


def store(
    path: Path, arrays: Arrays, *, cuts: Mapping[str, list[Cut]] | None = None, junk: bytes = b""
) -> StoredUpdate:
    """Write an update as a client would send it; magnitudes by numpy, not by the product's inspection."""
    boxes: list[tuple[Piece, bytes]] = []
    magnitudes: dict[str, float | int] = {}
    for name, array in arrays.items():
        whole: list[Cut] = [((0,) * array.ndim, array.shape)]
        for offsets, lengths in (cuts or {}).get(name, whole):
            index = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            raw = array[index].tobytes()
            dtype = DTYPES[array.dtype.str]
            boxes.append((Piece(name, dtype, offsets, lengths, hashlib.sha256(raw).hexdigest()), raw))
        magnitudes[name] = max((abs(value) for value in widened(array).reshape(-1).tolist()), default=0)
    pieces = pieces_in_order(piece for piece, _ in boxes)
    raws = dict(boxes)
    path.write_bytes(junk + b"".join(raws[piece] for piece in pieces))
    return StoredUpdate(path, pieces, magnitudes, data_start=len(junk))


def in_parts(update: StoredUpdate, num_parts: int, rng: np.random.Generator) -> StoredUpdate:
    """Deal the boxes of a stored update at random over that many files; some may stay empty."""
    raw, position = update.path.read_bytes(), update.data_start
    dealt: list[list[tuple[Piece, bytes]]] = [[] for _ in range(num_parts)]
    for piece in update.pieces:
        dealt[int(rng.integers(num_parts))].append((piece, raw[position : position + piece.num_bytes]))
        position += piece.num_bytes
    files = []
    for index, boxes in enumerate(dealt):
        files.append((update.path.with_name(f"{update.path.name}.{index}"), tuple(piece for piece, _ in boxes)))
        files[-1][0].write_bytes(b"".join(data for _, data in boxes))
    return StoredUpdate.of_parts(update.path.with_name(f"{update.path.name}.parts"), files, update.magnitudes)


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """Bits of bfloat16 as float32, everything else as it is."""
    return np.left_shift(array.astype(np.uint32), 16).view(np.float32) if array.dtype == np.uint16 else array


def fold_in(
    folder: Path,
    base: Arrays,
    updates: list[tuple[Arrays, int]],
    *,
    step: Step = Step(),  # noqa: B008 - a value
    **execution: Any,
) -> dict[str, NDArray[Any]]:
    """Store, fold and read back."""
    safetensors_file.write(folder / "base", base)
    weighted = [Weighted(store(folder / f"u{k}", arrays), weight) for k, (arrays, weight) in enumerate(updates)]
    fold(folder / "base", weighted, folder / "out", step=step, execution=Execution(**execution))
    return safetensors_file.read(folder / "out")


def float64_twin(base: Arrays, updates: list[tuple[Arrays, int]], name: str) -> NDArray[np.float64]:
    """base + sum_k w_k u_k / W in plain float64, in the order given."""
    carriers = [(widened(arrays[name]), weight) for arrays, weight in updates if name in arrays]
    total = sum(weight * values.astype(np.float64) for values, weight in carriers)
    return np.asarray(base[name].astype(np.float64) + total / sum(weight for _, weight in carriers))


def integer_twin(base: int, values: list[int], weights: list[int]) -> int:
    """base + round_half_even(sum_k w_k u_k / W) in rationals."""
    return base + round(Fraction(sum(w * u for w, u in zip(weights, values, strict=True)), sum(weights)))

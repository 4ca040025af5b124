"""The words of a mesh's update for a secure sum: each rank encodes its boxes once, and masks them at each order.

    train   plain part    -->  norm over all ranks  -->  encoded part, durable, then the plain one is deleted
    mask    encoded part  -->  + key streams        -->  masked part, the same bytes every time

Boxes have the words of one process: rounding and streams belong to positions in the model, not to ranks. So another
mesh may mask what an earlier one has encoded. The keys come with the order to rank 0 and reach the other ranks by one
collective. They are in no file, log or store, and end with the order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from atoll.ground.durable import remove
from atoll.ground.faults import faults_in
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.mesh_client.crash_points import reached
from atoll.parallel.mesh_client.together import together
from atoll.task.errors import NotFinite, TaskMismatch
from atoll.tensors.coverage import check_cover
from atoll.tensors.layout import FLOATS, Layout, Piece, Tensor
from atoll.tensors.masked import encode
from atoll.tensors.masked.mask import mask_part
from atoll.tensors.masked.parts import Box, assembled, encode_part, measure_part
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.pieces import part_name
from atoll.tensors.safetensors_file import parse_header
from atoll.tensors.secure.plan import EncodingPlan, Vector
from atoll.training.worker.bench import Json
from atoll.training.worker.operations import piece_fields

Part = list[tuple[Any, ...]]
"""The pieces of a part, as the worker protocol has them (`operations.piece_fields`)."""


def plan_in(order: Json, num_examples: float, statistics: Mapping[str, Sequence[float]]) -> EncodingPlan:
    """Return the plan of this member.

    Args:
        order: `secure` of a request to train: the fields of `Encoding`, `rounding` and `out`.
        num_examples: of the training.
        statistics: sums of its metrics.
    """
    return EncodingPlan(
        bits=order["bits"],
        clip_norm=order["clip_norm"],
        exponents=tuple(order["exponents"]),
        examples_max=order["examples_max"],
        metrics=tuple((name, length) for name, length in order["metrics"]),
        is_private=order["is_private"],
        share=order["share"],
        num_examples=num_examples,
        statistics=statistics,
    )


def encode_parts(
    order: Json, version: Path, plain: Path, parts: Sequence[Part], plan: EncodingPlan, ranks: Ranks
) -> Json:
    """Encode the plain parts of all ranks, and delete them; every rank calls it.

    Rank 0 adds `secure/exact`, also if it has no box of the model.

    Args:
        order: as of `plan_in`.
        version: file of the base version.
        plain: folder of the plain parts.
        parts: the pieces of each rank's plain part, in the order of the ranks; empty: it has none.
        plan: of this member.
        ranks: of the mesh.

    Returns:
        The pieces of each encoded part under `parts`, and `encoded`: norm, factor and sentences about metrics, as of
        `masked.encode.Encoded`.

    Raises:
        NotFinite: a value is NaN or infinite.
        TaskMismatch: the update has other tensors than the version.
        OSError: a file cannot be read or written.
    """
    layout, out = parse_header(version)[0], Path(order["out"])
    vector, mine = Vector(layout, plan), pieces_in(parts[ranks.rank])
    path = plain / part_name(_place(ranks.rank, parts))

    def measure() -> tuple[encode.Measured, list[Box]]:
        if ranks.is_first:
            if faults := check_cover(layout, _of_dtypes(layout, parts)):
                raise TaskMismatch(f"the update is not what a secure sum adds: {'; '.join(faults[:5])}")
            remove(out)
            out.mkdir(parents=True)
        try:
            return measure_part(path, mine) if mine else (encode.Measured(0.0, {}), [])
        except encode.NotFinite as fault:
            raise NotFinite(*faults_in(fault)) from fault

    measures, boxes = _of_all(ranks, *together(ranks, measure))
    found = encode.merged(measures)

    def write() -> Part:
        exact = encode.exact_words(vector, plan, found, assembled(layout, boxes)) if ranks.is_first else None
        # A rank of integers alone has no words: those are in secure/exact.
        has_words = [True, *(any(piece.dtype in FLOATS for piece in pieces_in(part)) for part in parts[1:])]
        if not has_words[ranks.rank]:
            return []
        target = out / part_name(_place(ranks.rank, has_words))
        if not mine:
            path.touch()  # rank 0 has the exact words alone, and reads nothing
        pieces = encode_part(
            path,
            target,
            mine,
            vector=vector,
            plan=plan,
            norm=found.norm,
            rounding=bytes.fromhex(order["rounding"]),
            exact=exact,
        )
        reached("crew.part_encoded")
        return piece_fields(pieces)

    encoded = [part for part in ranks.gather(together(ranks, write)) if part]
    if ranks.is_first:
        rmtree(plain)
    factor, left_out = plan.factor(plan.weight, found.norm, vector.num_values), list(encode.left_out_of(plan))
    return {"parts": encoded, "encoded": {"norm": found.norm, "factor": factor, "left_out": left_out}}


def mask_parts(request: Json, streams: Sequence[Sequence[Any]], ranks: Ranks) -> Json:
    """Mask encoded parts, each rank some of them, by turns; every rank calls it.

    Args:
        request: `mask` (`mesh_client/main`).
        streams: [key as hex, sign] of each, at rank 0; the other ranks get them here. If the request has a `share`, the
            last one is the key of this member's noise.
        ranks: of the mesh.

    Returns:
        The pieces of each masked part under `parts`, in their order.

    Raises:
        TensorFileCorrupted: an encoded part is damaged.
        OSError: a file cannot be read or written.
    """
    keys = [(bytes.fromhex(key), sign) for key, sign in ranks.gather(list(streams))[0]]
    share = GridNoise(request["share"], keys.pop()[0]) if request.get("share") else None
    layout = tuple(Tensor(name, dtype, tuple(shape)) for name, dtype, shape in request["layout"])
    parts = list(enumerate(request["parts"]))

    def mask() -> list[tuple[int, Part]]:
        found = []
        for index, part in parts[ranks.rank :: ranks.size]:
            pieces = mask_part(Path(part["encoded"]), Path(part["out"]), layout, pieces_in(part["pieces"]), keys, share)
            reached("crew.part_masked")
            found.append((index, piece_fields(tuple(pieces))))
        return found

    masked = dict(each for of_rank in ranks.gather(together(ranks, mask)) for each in of_rank)
    return {"parts": [masked[index] for index, _ in parts]}


def pieces_in(fields: Iterable[Sequence[Any]]) -> tuple[Piece, ...]:
    """Return the pieces of a part without a codec, from the fields of the worker protocol."""
    return tuple(Piece(name, dtype, tuple(o), tuple(n), sha256) for name, dtype, o, n, sha256 in fields)


def _of_dtypes(layout: Layout, parts: Iterable[Part]) -> Iterator[Piece]:
    """Yield all pieces, integers in their tensor's dtype: the differences of the ranks may have more than one."""
    dtypes = {tensor.name: tensor.dtype for tensor in layout}
    for piece in (piece for part in parts for piece in pieces_in(part)):
        yield piece if piece.dtype in FLOATS else replace(piece, dtype=dtypes.get(piece.tensor, piece.dtype))


def _place(rank: int, has_part: Sequence[Any]) -> int:
    """Return the index of a rank's part: ranks without one are left out."""
    return sum(map(bool, has_part[:rank]))


def _of_all(ranks: Ranks, measure: encode.Measured, boxes: Sequence[Box]) -> tuple[list[encode.Measured], list[Box]]:
    """Return what all ranks have measured, and their boxes of integer tensors, in the ranks' order."""
    whole = [(piece_fields((piece,)), values.reshape(-1).tolist()) for piece, values in boxes]
    found = ranks.gather([measure.squares, dict(measure.magnitudes), whole])
    measures = [encode.Measured(squares, magnitudes) for squares, magnitudes, _ in found]
    everywhere = [
        (pieces_in(fields)[0], np.array(values, np.int64)) for *_, of_rank in found for fields, values in of_rank
    ]
    return measures, everywhere

"""Masked rounds on disk: members of sessions, their stored updates, and what their sums should be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.masked.fold import Session
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Layout
from atoll.tensors.masked.encode import encode_update
from atoll.tensors.masked.mask import mask_update
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.secure.plan import EncodingPlan, Vector
from atoll.tensors.updates.reader import StoredUpdate
from tests.aggregation.models import Cut, random_cuts, store
from tests.tensors.masked.members import pairwise, stored

Arrays = Mapping[str, NDArray[Any]]


@dataclass
class Round:
    """Sessions of a round, with the words of their members before they were masked."""

    sessions: list[Session] = field(default_factory=list)
    words: list[list[Arrays]] = field(default_factory=list)


def masked_round(
    folder: Path,
    layout: Layout,
    plans: Sequence[Sequence[tuple[EncodingPlan, Arrays]]],
    cuts_seed: int | None = None,
    shares: Sequence[GridNoise | None] = (),
) -> Round:
    """Encode, mask and store the updates of sessions.

    Args:
        folder: of the files.
        layout: of the model.
        plans: for each session, the plan and the update of each member.
        cuts_seed: cut the tensors into random boxes, as a mesh does; None: whole tensors.
        shares: of all members in the noise, one session after the other; empty: they add none.
    """
    found, draw, left = Round(), np.random.default_rng(cuts_seed), [*shares]
    for number, members in enumerate(plans):
        streams, own = pairwise(len(members))
        updates, words = [], []
        for index, ((plan, update), mine) in enumerate(zip(members, streams, strict=True)):
            name = folder / f"s{number}m{index}"
            encode_update(stored(folder / "plain", update), folder / "encoded", layout=layout, plan=plan)
            words.append(safetensors_file.read(folder / "encoded"))
            mask_update(
                folder / "encoded",
                folder / "masked",
                Vector(layout, plan).masked,
                mine,
                share=left.pop(0) if left else None,
            )
            arrays = safetensors_file.read(folder / "masked")
            cuts: dict[str, list[Cut]] | None = None
            if cuts_seed is not None:
                cuts = {key: random_cuts(draw, array.shape, depth=3) for key, array in arrays.items() if array.size}
            updates.append(replace(store(name, arrays, cuts=cuts), magnitudes={}))
        found.sessions.append(Session(number, len(members), tuple(updates), tuple(own)))
        found.words.append(words)
    return found


def float_mean(round_: Round, vector: Vector, name: str, numbers: Sequence[int] | None = None) -> NDArray[np.float64]:
    """Return the mean of a float tensor in rationals, rounded at the end: step times words over the weights."""
    bits, range_ = vector.encoding.bits, Fraction(vector.ranges[name])
    step = range_ / ((1 << {32: 21, 64: 43}[bits]) - 1)
    chosen = [words for number in numbers or range(len(round_.words)) for words in round_.words[number]]
    weight = sum(int(words["secure/exact"][vector.exact.weight]) for words in chosen)
    total = np.sum([words[name].astype(object) for words in chosen], axis=0)
    flat = [float(Fraction(int(v)) * step * 2**52 / weight) for v in np.asarray(total, object).reshape(-1)]
    return np.array(flat).reshape(np.shape(total))


def split_over_ranks(session: Session, size: int, seed: int) -> list[Session]:
    """Return the session as each rank has it: every file at one rank, or its boxes dealt to several."""
    draw, found = np.random.default_rng(seed), []
    held: list[list[StoredUpdate]] = [[] for _ in range(size)]
    for update in session.updates:
        if draw.random() < 0.5 or size == 1:
            held[int(draw.integers(size))].append(update)
            continue
        raw, position = update.path.read_bytes(), update.data_start
        dealt: list[list[Any]] = [[] for _ in range(size)]
        for piece in update.pieces:
            dealt[int(draw.integers(size))].append((piece, raw[position : position + piece.num_bytes]))
            position += piece.num_bytes
        for rank, boxes in enumerate(dealt):
            file = update.path.with_name(f"{update.path.name}.at{rank}.{seed}")
            file.write_bytes(b"".join(data for _, data in boxes))
            if boxes:
                parts = [(file, tuple(piece for piece, _ in boxes))]
                held[rank].append(StoredUpdate.of_parts(file, parts, {}, is_partial=True))
    for updates in held:
        found.append(replace(session, updates=tuple(updates)))
    return found

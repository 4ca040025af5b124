"""The concatenation of updates in place of their mean: a model that grows, such as an ensemble of trees.

    new = base ++ u_1 ++ u_2 ++ ... ++ u_K        along the first axis of each tensor, in the order of the updates

An update has the rows that its client adds: its tensors differ from the model's in their first axes only. Values are
copied, never added: a row keeps the bits that the client sent. Weights and factors have no meaning.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.streaming import FILES_OPEN_MAX, TILE_ELEMENTS, Folded
from atoll.tensors.coverage import appended, check_rows
from atoll.tensors.layout import Layout, Tensor, in_order
from atoll.tensors.pieces import cut_layout, piece_bytes_of
from atoll.tensors.safetensors_file import NUMPY_DTYPES, TensorFileWriter, parse_header, read_metadata
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader, stored_model


def concatenate(
    base: Path,
    updates: Sequence[StoredUpdate],
    out: Path,
    *,
    between: Callable[[], None] | None = None,
    durable: bool = True,
) -> Folded:
    """Write the version that follows `base` to `out`, atomically and, unless durable=False, durably.

    Memory is one block, whatever the size of the model or of the cohort.

    Args:
        base: the global model to which the updates' rows are appended: a safetensors file.
        updates: K >= 1 accepted updates (`coverage.check_rows`), in the order of their client ids.
        out: the file of the new version, which gets the base's metadata.
        between: called between two blocks; it may raise to interrupt the work.
        durable: sync the file before returning.

    Returns:
        The pieces of the new version; there are no slots.

    Raises:
        ValueError: no updates, or an update with other tensors than the base has.
        TensorFileCorrupted: a file is shorter than it should be, or the base has a broken header.
    """
    if not updates:
        raise ValueError("no updates to concatenate")
    layout, _ = parse_header(base)
    parts = [layout, *(_checked(layout, update) for update in updates)]
    whole = grown(parts)
    pieces = tuple(cut_layout(whole, piece_bytes_of(whole)))
    with ExitStack() as stack:
        readers = [
            stack.enter_context(UpdateReader(part, keep_open=k < FILES_OPEN_MAX))
            for k, part in enumerate([stored_model(base), *updates])
        ]
        writer = stack.enter_context(TensorFileWriter(out, whole, metadata=read_metadata(base), pieces=pieces))
        for block in chain.from_iterable(_blocks(*each) for each in _in_order(parts, readers)):
            if between is not None:
                between()
            writer.append(block)
        return Folded(writer.finish(durable=durable), {})


def grown(parts: Iterable[Layout]) -> Layout:
    """Return the tensors with the rows of all parts; each part has the same tensors, in the same order."""
    return tuple(
        replace(tensors[0], shape=(sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:]))
        for tensors in zip(*parts, strict=True)
    )


def _checked(layout: Layout, update: StoredUpdate) -> Layout:
    """Check that an update has the base's tensors, and return them in the base's order; else raise ValueError."""
    if faults := check_rows(layout, update.pieces):
        raise ValueError(f"update {update.path}: {'; '.join(faults)}")
    return appended(layout, update.pieces)


def _in_order(parts: Sequence[Layout], readers: Sequence[UpdateReader]) -> Iterator[tuple[Tensor, UpdateReader]]:
    """Yield each part of the new version, in the order of its bytes, and its source."""
    by_name = [{tensor.name: tensor for tensor in part} for part in parts]
    for tensor in in_order(parts[0]):
        for of_part, reader in zip(by_name, readers, strict=True):
            yield of_part[tensor.name], reader


def _blocks(tensor: Tensor, reader: UpdateReader) -> Iterator[NDArray[Any]]:
    """Yield the values of one tensor of one part, in the tensor's dtype."""
    for start in range(0, tensor.num_elements, TILE_ELEMENTS):
        stop = min(start + TILE_ELEMENTS, tensor.num_elements)
        yield reader.read(tensor, start, stop, np.empty(stop - start, NUMPY_DTYPES[tensor.dtype]))

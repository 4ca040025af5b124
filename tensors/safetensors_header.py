"""The header of a safetensors file: `length (8 bytes, little-endian) | JSON`.

    {"__metadata__": {text: text}, NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}

Offsets count from the end of the header. Here they leave no gap, no overlap and no byte behind the last tensor.

Source: https://github.com/huggingface/safetensors, "Format" in its README.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atoll.ground.printable import count_of
from atoll.tensors.layout import ITEM_BYTES, Layout, Tensor

HEADER_BYTES_MAX = 1 << 22
"""Largest header that is read or written [bytes]: 1 KiB for each of 4,096 tensors."""

AXES_MAX = 64
"""Largest number of a tensor's axes: numpy's limit."""


class TensorFileCorrupted(OSError):
    """The bytes of a file contradict its header, its manifest or the format."""


def header_bytes(layout: Iterable[Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return all bytes before the data: length and header, padded with spaces so that the data starts 8-byte aligned.

    Args:
        layout: the entries in the order of their bytes; for a model the canonical order.
        metadata: free text.

    Raises:
        ValueError: a duplicate or reserved name, an unknown dtype, a negative length, or a header that is too long.
    """
    tensors = tuple(layout)
    for tensor in tensors:
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {tensor.dtype!r} of tensor {tensor.name!r} is not one of {', '.join(ITEM_BYTES)}")
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for tensor in tensors:
        if tensor.name in entries or tensor.name == "__metadata__":
            raise ValueError(f"tensor name {tensor.name!r} is taken")
        if min(tensor.shape, default=0) < 0:
            raise ValueError(f"shape {tensor.shape} of tensor {tensor.name!r} has a negative length")
        end = begin + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
        begin = end
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > HEADER_BYTES_MAX:
        raise ValueError(f"header of {count_of(len(header), 'byte')} is longer than {HEADER_BYTES_MAX}")
    return len(header).to_bytes(8, "little") + header


def decode_header(raw: bytes, data_bytes: int) -> tuple[Layout, dict[str, str]]:
    """Return the tensors, in the order of their bytes, and the metadata that a header describes.

    Args:
        raw: the JSON, without the length before it; untrusted.
        data_bytes: the number of bytes that follow it.

    Raises:
        ValueError: the header breaks the format, or does not describe every byte exactly once.
    """
    try:
        entries = _decode_json(raw)
    except RecursionError as fault:
        raise ValueError("header is nested too deeply") from fault
    metadata = _decode_metadata(entries.pop("__metadata__", {}))
    return _decode_layout(entries, data_bytes), metadata


def read_header(path: Path) -> tuple[Layout, dict[str, str], int]:
    """Return the tensors of a file in the order of their bytes, its metadata, and where the data starts [bytes].

    Raises:
        TensorFileCorrupted: the header breaks the format, or does not describe every byte of the file exactly once.
    """
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or length > min(HEADER_BYTES_MAX, num_bytes - 8):
            raise TensorFileCorrupted(
                f"{path}: header of {count_of(length, 'byte')} in a file of {num_bytes} (at most {HEADER_BYTES_MAX})"
            )
        raw = file.read(length)
    try:
        layout, metadata = decode_header(raw, num_bytes - 8 - length)
    except ValueError as fault:
        raise TensorFileCorrupted(f"{path}: {fault}") from fault
    return layout, metadata, 8 + length


def _decode_json(raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            raise ValueError("header has a key twice")
        return entries

    if raw[:1] != b"{":
        raise ValueError("header does not begin with {")
    entries: dict[str, Any] = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    return entries


def _decode_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("metadata is not a table of strings")
    return metadata


def _decode_layout(entries: Mapping[str, Any], data_bytes: int) -> Layout:
    spans = sorted((_decode_tensor(*entry) for entry in entries.items()), key=lambda span: span[:2])
    reached = 0
    for begin, end, tensor in spans:
        if begin != reached or end - begin != tensor.num_bytes:
            raise ValueError(
                f"data_offsets [{begin}, {end}] of tensor {tensor.name!r} are not "
                f"[{reached}, {reached + tensor.num_bytes}]"
            )
        reached = end
    if reached != data_bytes:
        raise ValueError(
            f"tensors have {count_of(reached, 'byte')}, the file has {count_of(data_bytes, 'byte')} of data"
        )
    return tuple(tensor for _, _, tensor in spans)


def _decode_tensor(name: str, entry: Any) -> tuple[int, int, Tensor]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} has other fields than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype!r} of tensor {name!r} is not one of {', '.join(ITEM_BYTES)}")
    if not _are_naturals(shape) or len(shape) > AXES_MAX:
        raise ValueError(f"shape of tensor {name!r} is not a list of at most {AXES_MAX} lengths")
    if not _are_naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"data_offsets of tensor {name!r} are not a begin and an end")
    return offsets[0], offsets[1], Tensor(name, dtype, tuple(shape))


def _are_naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)

"""Data that is too large for memory: text files and shards of arrays, from which single examples are read.

They are map-style, so that an order is arithmetic over them too: seeded, divided over the ranks, and resumed at the
exact example without reading the earlier ones. With the order's `shards` they are read shard by shard.
"""

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from examples.datasets.text import BYTES

Source = Path | tuple[Path, Path]
"""One .npz file with both arrays, or two .npy files: inputs and targets."""


class ByteTokens:
    """The byte tokens of text files, each one document with its end, as if they were one flat uint16 array.

    Slices are read from the files: the tokens that `pack_text` would write, without writing them. Files must not
    change.

    Args:
        paths: in this order.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._starts = np.cumsum([0, *(path.stat().st_size + 1 for path in self._paths)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, where: slice) -> npt.NDArray[np.uint16]:
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise ValueError(f"only runs of tokens can be read, got a step of {step}")
        tokens = np.full(max(stop - start, 0), BYTES.eos, np.uint16)
        document = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self._starts[document + 1]))
            content = min(end, int(self._starts[document + 1]) - 1) - start  # without the document's end
            tokens[len(tokens) - (stop - start) :][:content] = self._read(document, start, content)
            start, document = end, document + 1
        return tokens

    def _read(self, document: int, start: int, length: int) -> npt.NDArray[np.uint8]:
        file = os.open(self._paths[document], os.O_RDONLY)
        try:
            content = os.pread(file, length, start - int(self._starts[document]))
        finally:
            os.close(file)
        if len(content) < length:
            raise OSError(f"{self._paths[document]} has become shorter since it was opened")
        return np.frombuffer(content, np.uint8)


class ArrayShards:
    """A map-style data set of (inputs, targets) over files of numpy arrays; the first dimension counts examples.

    A pair of .npy files is mapped into memory, and an example read from its place. An .npz file is read as a whole on
    demand: give the order the `shards`, and `num_open` its `open_shards` for each part.

    Args:
        sources: the shards.
        keys: names of inputs and targets within an .npz file.
        num_open: shards that stay in memory (>= 1).

    Raises:
        ValueError: inputs and targets of a shard differ in length.
    """

    def __init__(
        self, sources: Sequence[Source], *, keys: tuple[str, str] = ("inputs", "targets"), num_open: int = 2
    ) -> None:
        self._sources, self._keys, self._num_open = list(sources), keys, num_open
        self.shards = tuple(self._size(source) for source in self._sources)
        """The sizes of the shards, for the order."""
        self._starts = np.cumsum([0, *self.shards])
        self._open: dict[int, list[npt.NDArray[Any]]] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        inputs, targets = (torch.from_numpy(np.array(array[index - self._starts[shard]])) for array in self._at(shard))
        return inputs, targets

    def _at(self, shard: int) -> list[npt.NDArray[Any]]:
        """Return the shard's arrays, and mark it as the most recently used."""
        arrays = self._open.pop(shard, None)
        if arrays is None:
            while len(self._open) >= self._num_open:
                del self._open[next(iter(self._open))]
            arrays = self._load(self._sources[shard])
        self._open[shard] = arrays
        return arrays

    def _load(self, source: Source) -> list[npt.NDArray[Any]]:
        if isinstance(source, tuple):
            return [np.load(path, mmap_mode="r") for path in source]
        with np.load(source) as arrays:
            return [arrays[key] for key in self._keys]

    def _size(self, source: Source) -> int:
        """Return the number of examples, from the headers alone."""
        if isinstance(source, tuple):
            lengths = [len(np.load(path, mmap_mode="r")) for path in source]
        else:
            with zipfile.ZipFile(source) as archive:
                lengths = [_length(archive, f"{key}.npy") for key in self._keys]
        if lengths[0] != lengths[1]:
            raise ValueError(f"{source}: {lengths[0]} inputs, but {lengths[1]} targets")
        return lengths[0]


def _length(archive: zipfile.ZipFile, name: str) -> int:
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return int(read(file)[0][0])

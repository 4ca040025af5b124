"""IDX files, the layout of MNIST and Fashion-MNIST: plain, or compressed with gzip.

    bytes 0-1    zero
    byte  2      the kind of number: 0x08 uint8, 0x09 int8, 0x0B int16, 0x0C int32, 0x0D float32, 0x0E float64
    byte  3      D, the number of dimensions
    4 D bytes    their sizes, uint32 big-endian
    the rest     the numbers in C order, big-endian

Source:
    LeCun, Cortes, Burges, "The MNIST database of handwritten digits", section "the IDX file format".
"""

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from atoll.ground.printable import count_of
from examples.datasets.folder import BadData, find, read_checked
from examples.datasets.owned import Splits

KINDS = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP = b"\x1f\x8b"


def read_idx(path: Path, sha256: str | None = None) -> NDArray[Any]:
    """Return the array in a file, in this machine's byte order.

    Args:
        path: of the file; compressed or not, whatever its name.
        sha256: of the file as it is; as for `read_checked`.

    Raises:
        NoData: there is no such file.
        BadData: a digest, the magic number, the number of bytes or the compression is wrong.
    """
    content = _uncompressed(path, read_checked(path, sha256))
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in KINDS:
        known = ", ".join(f"0000{kind:02x}" for kind in KINDS)
        raise BadData(f"{path}: begins with {content[:4].hex() or 'nothing'}, but an IDX file with {known}")
    dtype, begin = np.dtype(KINDS[content[2]]), 4 + 4 * content[3]
    if len(content) < begin:
        raise BadData(f"{path}: ends after {count_of(len(content), 'byte')}, in its header of {begin}")
    shape = tuple(np.frombuffer(content, ">u4", count=content[3], offset=4).tolist())
    expected = begin + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise BadData(f"{path}: has {count_of(len(content), 'byte')}, but {dtype.name} of shape {shape} has {expected}")
    return np.frombuffer(content, dtype, offset=begin).reshape(shape).astype(dtype.newbyteorder("="))


def read_mnist(folder: Path) -> Splits:
    """Read MNIST, Fashion-MNIST or another set in the same format.

    Images are (n, 1, H, W) float32 in [0, 1], labels (n,) int64.

    Args:
        folder: with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
            t10k-labels-idx1-ubyte, each with or without .gz.

    Raises:
        NoData: a file is missing.
        BadData: a file is damaged or of another kind, or images and labels differ in number.
    """
    return Splits(_pair(folder, "train"), _pair(folder, "t10k"))


def _pair(folder: Path, split: str) -> TensorDataset:
    paths = [
        find(folder, *(f"{split}-{what}{dot}idx{ndim}-ubyte{end}" for dot in "-." for end in ("", ".gz")))
        for what, ndim in (("images", 3), ("labels", 1))
    ]
    images, labels = map(read_idx, paths)
    for path, array, ndim in zip(paths, (images, labels), (3, 1), strict=True):
        if array.dtype != np.uint8 or array.ndim != ndim:
            raise BadData(
                f"{path}: is {array.dtype} in {count_of(array.ndim, 'dimension')}, but must be uint8 in {ndim}"
            )
    if len(images) != len(labels):
        raise BadData(
            f"{folder}: {len(images)} images in {paths[0].name}, but {count_of(len(labels), 'label')} in "
            f"{paths[1].name}"
        )
    return TensorDataset(torch.from_numpy(images)[:, None].float().div_(255), torch.from_numpy(labels).long())


def _uncompressed(path: Path, content: bytes) -> bytes:
    if not content.startswith(GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise BadData(f"{path}: cannot be uncompressed: {error}") from error

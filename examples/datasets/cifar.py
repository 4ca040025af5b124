"""CIFAR-10 in its binary version: as a folder, or as the archive in which it is published.

A file is a row of records of 3,073 bytes: the label, 0 to 9, and 32 x 32 pixels of red, of green and of blue, row by
row. data_batch_1.bin to data_batch_5.bin are the training split, test_batch.bin the test split.

Source:
    Krizhevsky, "The CIFAR-10 dataset", section "Binary version".
"""

import io
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch.utils.data import TensorDataset

from atoll.ground.printable import count_of
from examples.datasets.folder import BadData, NoData, read_checked
from examples.datasets.owned import Splits

SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)


def read_cifar10(path: Path, sha256: str | None = None) -> Splits:
    """Read images (n, 3, 32, 32) float32 in [0, 1], labels (n,) int64.

    Args:
        path: a folder with the six files, or cifar-10-binary.tar.gz, which is read in place.
        sha256: of the archive; as for `read_checked`.

    Raises:
        NoData: there is no such folder or archive, or a file is missing in it.
        BadData: a file is damaged or of another kind.
    """
    with _files(path, sha256) as read:
        return Splits(_joined(path, read, TRAIN), _joined(path, read, TEST))


@contextmanager
def _files(path: Path, sha256: str | None) -> Iterator[Callable[[str], bytes]]:
    """Provide the function that reads a file by its name; nothing is written to disk."""
    if path.is_dir():
        yield lambda name: read_checked(path / name)
        return
    content = read_checked(path, sha256)
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            members = {PurePosixPath(member.name).name: member for member in archive if member.isfile()}

            def read(name: str) -> bytes:
                if name not in members:
                    raise NoData(f"{path}: there is no {name} in it (files: {', '.join(sorted(members)) or 'none'})")
                file = archive.extractfile(members[name])
                assert file is not None
                return file.read()

            yield read
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise BadData(f"{path}: is no complete archive: {error}") from error


def _joined(path: Path, read: Callable[[str], bytes], names: tuple[str, ...]) -> TensorDataset:
    records = np.concatenate([_records(path, name, read(name)) for name in names])
    images = torch.from_numpy(records[:, 1:].reshape(-1, *SHAPE)).float().div_(255)
    return TensorDataset(images, torch.from_numpy(records[:, 0]).long())


def _records(path: Path, name: str, content: bytes) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    if not content or len(content) % RECORD:
        raise BadData(f"{path}: {name} has {count_of(len(content), 'byte')}, but must be records of {RECORD}")
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    if (wrong := np.flatnonzero(records[:, 0] > 9)).size:
        raise BadData(f"{path}: {name}: record {wrong[0]} has the label {records[wrong[0], 0]}; allowed: 0 to 9")
    return records

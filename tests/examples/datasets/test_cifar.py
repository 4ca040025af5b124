"""CIFAR-10's binary version, laid out by hand: a folder and the archive."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.datasets.cifar import RECORD, TEST, TRAIN, read_cifar10
from examples.datasets.folder import BadData, NoData


def record(label: int, red: int, green: int, blue: int, *, corner: int = 0) -> bytes:
    """One image of one colour, but for its second pixel in the first row of red."""
    pixels = [[colour] * 1024 for colour in (red, green, blue)]
    pixels[0][1] = corner
    return bytes([label, *pixels[0], *pixels[1], *pixels[2]])


FILES = {name: record(k, 51 * k, 0, 255, corner=255) * (k + 1) for k, name in enumerate((*TRAIN, *TEST))}


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("is_archive", [False, True])
def test_images_are_planes_of_red_green_and_blue(tmp_path: Path, is_archive: bool) -> None:
    path = archive(tmp_path / "c.tar.gz", FILES) if is_archive else tmp_path
    for name, content in FILES.items() if not is_archive else ():
        (tmp_path / name).write_bytes(content)
    train, test = read_cifar10(path)
    images, labels = train.tensors
    assert labels.tolist() == [k for k in range(5) for _ in range(k + 1)]
    assert (images.shape, images.dtype) == ((15, 3, 32, 32), torch.float32)
    np.testing.assert_allclose(images[3, :, 5, 7], [0.4, 0.0, 1.0], atol=1e-7)
    assert images[3, 0, 0, 1] == 1.0  # the second pixel of the first row, and not of the first column
    assert images[3, 0, 1, 0] == images[3, 0, 0, 0]
    assert test.tensors[1].tolist() == [5] * 6


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", f"data_batch_3.bin has 0 bytes, but must be records of {RECORD}"),
        (record(1, 2, 3, 4)[:-1], f"data_batch_3.bin has {RECORD - 1} bytes"),
        (record(1, 2, 3, 4) + record(10, 2, 3, 4), "data_batch_3.bin: record 1 has the label 10"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(tmp_path: Path, content: bytes, fault: str) -> None:
    with pytest.raises(BadData, match=fault):
        read_cifar10(archive(tmp_path / "c.tar.gz", FILES | {"data_batch_3.bin": content}))


def test_what_is_missing_or_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="there is no such file"):
        read_cifar10(tmp_path / "c.tar.gz")
    with pytest.raises(NoData, match=r"data_batch_1\.bin: there is no such file"):
        read_cifar10(tmp_path)
    pickled = archive(tmp_path / "cifar-10-python.tar.gz", {"data_batch_1": b"\x80\x02"})
    with pytest.raises(NoData, match=r"there is no data_batch_1\.bin in it \(files: data_batch_1\)"):
        read_cifar10(pickled)
    whole = archive(tmp_path / "c.tar.gz", FILES).read_bytes()
    for part in (b"no archive", whole[: len(whole) // 2]):
        (tmp_path / "c.tar.gz").write_bytes(part)
        with pytest.raises(BadData, match=r"c\.tar\.gz: is no complete archive"):
            read_cifar10(tmp_path / "c.tar.gz")


def test_the_archive_s_digest_is_checked(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="; expected: "):
        read_cifar10(archive(tmp_path / "c.tar.gz", FILES), sha256="0" * 64)

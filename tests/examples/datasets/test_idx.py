"""IDX files laid out by hand from the format's description, and the real MNIST."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.datasets.folder import BadData, NoData, data_folder
from examples.datasets.idx import read_idx, read_mnist
from tests.public_data import needs_data

IMAGES = bytes.fromhex("00000803 00000002 00000002 00000003") + bytes([0, 51, 102, 153, 204, 255, 1, 2, 3, 4, 5, 6])
LABELS = bytes.fromhex("00000801 00000002") + bytes([7, 3])


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_an_array_is_read_plain_and_compressed(tmp_path: Path) -> None:
    expected = np.array([[[0, 51, 102], [153, 204, 255]], [[1, 2, 3], [4, 5, 6]]], np.uint8)
    for content in (IMAGES, gzip.compress(IMAGES, mtime=0)):
        found = read_idx(write(tmp_path / "x", content))
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "form", "values"),
    [
        ("09", "b", [-1, 5]),
        ("0b", "h", [-300, 300]),
        ("0c", "i", [-70000, 7]),
        ("0d", "f", [0.5, -2.25]),
        ("0e", "d", [1e-300, 3.0]),
    ],
)
def test_every_kind_of_number_is_big_endian(tmp_path: Path, kind: str, form: str, values: list[float]) -> None:
    content = bytes.fromhex(f"0000{kind}01 00000002") + struct.pack(f">2{form}", *values)
    assert read_idx(write(tmp_path / "x", content)).tolist() == values


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "begins with nothing, but an IDX file with 00000"),
        (b"\x89PNG", "begins with 89504e47"),
        (bytes.fromhex("00000703"), "begins with 00000703"),
        (IMAGES[:10], "ends after 10 bytes, in its header of 16"),
        (IMAGES[:-1], r"has 27 bytes, but uint8 of shape \(2, 2, 3\) has 28"),
        (IMAGES + b"x", r"has 29 bytes, but uint8 of shape \(2, 2, 3\) has 28"),
        (gzip.compress(IMAGES, mtime=0)[:-9], "cannot be uncompressed"),
        (gzip.compress(IMAGES, mtime=0)[:20] + b"\0" * 20, "cannot be uncompressed"),
    ],
)
def test_a_file_that_is_none_or_not_whole_is_refused(tmp_path: Path, content: bytes, fault: str) -> None:
    with pytest.raises(BadData, match=fault):
        read_idx(write(tmp_path / "x", content))


def four_files(folder: Path, *, labels: bytes = LABELS) -> None:
    write(folder / "train-images-idx3-ubyte", IMAGES)
    write(folder / "train-labels-idx1-ubyte", labels)
    write(folder / "t10k-images-idx3-ubyte.gz", gzip.compress(IMAGES, mtime=0))
    write(folder / "t10k-labels.idx1-ubyte", LABELS)


def test_images_come_in_unit_range_with_a_channel_and_labels_as_integers(tmp_path: Path) -> None:
    four_files(tmp_path)
    train, test = read_mnist(tmp_path)
    images, labels = train.tensors
    assert torch.equal(images[0, 0], torch.tensor([[0, 0.2, 0.4], [0.6, 0.8, 1.0]]))
    assert (images.shape, images.dtype, labels.tolist()) == ((2, 1, 2, 3), torch.float32, [7, 3])
    assert labels.dtype == torch.int64
    assert torch.equal(images, test.tensors[0])


def test_images_and_labels_must_belong_together(tmp_path: Path) -> None:
    with pytest.raises(NoData, match=r"has none of the files train-images-idx3-ubyte, train-images-idx3-ubyte\.gz"):
        read_mnist(tmp_path)
    four_files(tmp_path, labels=bytes.fromhex("00000801 00000003") + bytes([7, 3, 1]))
    with pytest.raises(BadData, match=r"2 images in train-images-idx3-ubyte, but 3 labels"):
        read_mnist(tmp_path)
    four_files(tmp_path, labels=IMAGES)
    with pytest.raises(BadData, match="is uint8 in 3 dimensions, but must be uint8 in 1"):
        read_mnist(tmp_path)


@needs_data
def test_the_real_labels_are_mnist_s() -> None:
    """The MD5 of the uncompressed files as published, and the number of each digit."""
    folder = data_folder("mnist")
    md5 = {
        "train-labels-idx1": "a25bea736e30d166cdddb491f175f624",
        "t10k-labels-idx1": "27ae3e4e09519cfbb04c329615203637",
    }
    for name, expected in md5.items():
        assert hashlib.md5(gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes())).hexdigest() == expected
    counts = np.bincount(read_idx(folder / "train-labels-idx1-ubyte.gz"))
    assert counts.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@needs_data
def test_the_real_test_images_have_mnist_s_mean() -> None:
    images = read_idx(data_folder("mnist") / "t10k-images-idx3-ubyte.gz")
    assert images.shape == (10_000, 28, 28)
    assert images.mean() / 255 == pytest.approx(0.1325, abs=5e-5)

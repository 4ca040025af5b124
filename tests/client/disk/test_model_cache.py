"""The model cache: versions grow in canonical order, from all bytes that are there, and every piece is checked."""

import os

import numpy as np
import pytest

from atoll.client.disk.model_cache import ModelCache, PieceDamaged
from atoll.tensors.safetensors_file import read
from tests.client.fake_coordinator import Version, model

SIZES = {"a": 100, "b": 7, "c": 300, "d": 1}


def cache_in(tmp_path):
    cache = ModelCache(tmp_path)
    cache.scan()
    return cache


def fetch(cache, version, *, chunk=64):
    """Complete a version chunk by chunk, and return the number of bytes that had to arrive."""
    partial = cache.begin(version.digest, version.manifest)
    partial.resume()
    data = b"".join(version.bytes_of[piece.tensor, piece.offsets] for piece in partial.wanted)[partial.filled_bytes :]
    for start in range(0, len(data), chunk):
        partial.append(data[start : start + chunk])
    assert partial.is_complete
    cache.finish(version.digest, version.manifest, partial)
    cache.tidy()
    return len(data)


def test_version_that_came_in_chunks_is_the_version(tmp_path):
    arrays = model(**SIZES) | {"n": np.arange(5), "empty": np.zeros((0, 3), np.float32), "scalar": np.float32(2.5)}
    version = Version({name: np.asarray(array) for name, array in arrays.items()})
    cache = cache_in(tmp_path)
    assert cache.find(version.digest, version.manifest) is None
    assert fetch(cache, version) == version.manifest.num_bytes
    path = cache.find(version.digest, version.manifest)
    for name, array in read(path).items():
        np.testing.assert_array_equal(array, arrays[name])


@pytest.mark.parametrize("position", [0, 1, 399, 400, 401, 428, 500, 1631, 1632])
def test_restart_goes_on_at_the_byte_where_it_stopped(tmp_path, position):
    version = Version(model(**SIZES))
    partial = cache_in(tmp_path).begin(version.digest, version.manifest)
    partial.resume()
    partial.append(version.data[:position])  # and now the process dies: nothing is closed
    again = cache_in(tmp_path).begin(version.digest, version.manifest)
    again.resume()
    assert again.data_bytes == position
    again.append(version.data[position:])
    assert again.is_complete
    path = cache_in(tmp_path).finish(version.digest, version.manifest, again)
    assert path.read_bytes().endswith(version.data)
    partial.close()


def test_file_that_was_cut_within_its_header_is_begun_again(tmp_path):
    version = Version(model(**SIZES))
    (tmp_path / f"{version.digest}.part").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert fetch(cache_in(tmp_path), version) == len(version.data)


def test_what_a_power_cut_has_spoilt_comes_again(tmp_path):
    version = Version(model(**SIZES))
    partial = cache_in(tmp_path).begin(version.digest, version.manifest)
    partial.resume()
    partial.append(version.data[:600])
    partial.close()
    path = tmp_path / f"{version.digest}.part"
    with path.open("r+b") as file:
        file.seek(-150, os.SEEK_END)
        file.write(b"\0" * 8)  # in tensor c, which is not whole: it shows at its end
        file.seek(-210, os.SEEK_END)
        file.write(b"\0" * 8)  # in tensor a
    again = cache_in(tmp_path).begin(version.digest, version.manifest)
    again.resume()
    assert again.data_bytes == 0
    again.close()
    assert fetch(cache_in(tmp_path), version) == len(version.data)


def test_only_what_changed_comes_over_the_wire(tmp_path):
    old = Version(model(**SIZES))
    new = Version(model(**SIZES) | {"b": np.zeros(7, np.float32)})
    cache = cache_in(tmp_path)
    fetch(cache, old)
    assert fetch(cache, new) == 28
    assert cache.find(new.digest, new.manifest).read_bytes().endswith(new.data)


def test_pieces_are_reused_across_a_restart_and_from_any_place(tmp_path):
    old = Version(model(**SIZES))
    arrays = model(**SIZES)
    new = Version({"z": arrays["a"], "y": arrays["c"], "x": np.ones(9, np.float32)})
    fetch(cache_in(tmp_path), old)
    assert fetch(cache_in(tmp_path), new) == 36


def test_piece_that_rotted_in_an_older_version_comes_over_the_wire(tmp_path):
    old, new = Version(model(**SIZES)), Version(model(**SIZES) | {"b": np.zeros(7, np.float32)})
    cache = cache_in(tmp_path)
    fetch(cache, old)
    with cache.path(old.digest).open("r+b") as file:
        file.seek(-len(old.data) + 4, os.SEEK_END)
        file.write(b"rot")
    assert fetch(cache, new) == 428  # a and b; c and d are copied


def test_damaged_piece_is_cut_off_and_wanted_again(tmp_path):
    version = Version(model(**SIZES))
    cache = cache_in(tmp_path)
    partial = cache.begin(version.digest, version.manifest)
    partial.resume()
    with pytest.raises(PieceDamaged, match="'b'"):
        partial.append(version.data[:410] + b"x" + version.data[411:900])
    assert partial.data_bytes == 400
    assert [piece.tensor for piece in partial.wanted] == ["b", "c", "d"]
    partial.append(version.data[400:])
    assert partial.is_complete
    partial.close()


def test_two_newest_versions_are_kept_and_no_part(tmp_path):
    cache = cache_in(tmp_path)
    versions = [Version(model(seed, **SIZES)) for seed in range(4)]
    cache.begin("0" * 64, versions[3].manifest).close()
    for version in versions[:3]:
        fetch(cache, version)
    assert cache.find(versions[1].digest, versions[1].manifest) is not None  # in use again
    fetch(cache, versions[3])
    kept = {f"{versions[1].digest}.safetensors", f"{versions[3].digest}.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_version_that_comes_back_before_it_was_deleted_stays(tmp_path):
    cache = cache_in(tmp_path)
    versions = [Version(model(seed, **SIZES)) for seed in range(3)]
    for version in [*versions, versions[0]]:
        partial = cache.begin(version.digest, version.manifest)
        partial.resume()
        partial.append(b"".join(version.bytes_of[piece.tensor, piece.offsets] for piece in partial.wanted))
        cache.finish(version.digest, version.manifest, partial)  # and the task that would tidy is cancelled
    cache.tidy()
    for version in (versions[2], versions[0]):
        assert cache.find(version.digest, version.manifest).exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_part_that_is_begun_again_before_it_was_deleted_stays(tmp_path):
    cache = cache_in(tmp_path)
    first, second = (Version(model(seed, **SIZES)) for seed in range(2))
    cache.begin(second.digest, second.manifest).close()
    partial = cache.begin(first.digest, first.manifest)
    partial.resume()
    partial.append(first.data)
    cache.finish(first.digest, first.manifest, partial)
    again = cache.begin(second.digest, second.manifest)
    cache.tidy()
    assert (tmp_path / f"{second.digest}.part").exists()
    again.close()


def test_whole_version_that_rotted_is_not_found_after_a_restart(tmp_path):
    version = Version(model(**SIZES))
    cache = cache_in(tmp_path)
    fetch(cache, version)
    with cache.path(version.digest).open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"rot")
    cache = cache_in(tmp_path)
    assert cache.find(version.digest, version.manifest) is None
    assert fetch(cache, version) == 4

"""The move of a file: whole under its new name or not there, also onto another file system."""

import errno
import os
from pathlib import Path

import pytest

from atoll.ground import durable
from atoll.ground.durable import DiskFull, move_into


@pytest.fixture(params=["same disk", "other disk"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "same disk":
        (tmp_path / "folder").mkdir()
        return tmp_path / "folder" / "new"
    folder: Path = request.getfixturevalue("other_disk")
    return folder / "new"


def written(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 10_000)
    source.chmod(0o600)
    return source


def test_a_file_is_moved_with_its_bytes_and_mode_in_place_of_an_older_one(tmp_path: Path, target: Path) -> None:
    target.write_text("older")
    source = written(tmp_path)
    move_into(source, target)
    assert target.read_bytes() == bytes(range(256)) * 10_000
    assert target.stat().st_mode & 0o777 == 0o600
    assert not source.exists()
    assert [path.name for path in target.parent.iterdir()] == ["new"]


def test_a_full_disk_leaves_the_source_and_no_part(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = written(tmp_path), other_disk / "new"

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable.shutil, "copyfileobj", no_room)
    with pytest.raises(DiskFull) as refused:
        move_into(source, target)
    assert refused.value.errno == errno.ENOSPC
    assert source.exists()
    assert list(other_disk.iterdir()) == []


def test_another_failure_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        move_into(tmp_path / "nothing", tmp_path / "new")

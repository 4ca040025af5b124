import shutil

import pytest

from atoll.ground.folder_id import FILE, folder_id


def test_a_folder_keeps_its_id_a_copy_has_it_too_and_another_one_has_another(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = folder_id(tmp_path / "a")
    assert folder_id(tmp_path / "a") == first
    assert folder_id(tmp_path / "b") != first
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert folder_id(tmp_path / "copy") == first


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"0123", b"x" * 1000], ids=["empty", "binary", "short", "long"])
def test_a_damaged_id_is_made_anew(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    found = folder_id(tmp_path)
    assert len(found) == 32
    assert folder_id(tmp_path) == found
